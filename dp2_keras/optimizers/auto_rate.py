"""How a learning rate falls to 0, and where it begins, by the noise that it leaves in the weights.

    lr_j = r j / (nu sqrt(1^2 + ... + T^2)),   j = T, T - 1, ..., 1 steps left
    sum_j (lr_j nu)^2 = r^2

nu is the deviation of the noise in one step's gradient. So the noise of all T steps moves a weight by r,
whatever the batch size, the noise multiplier, the clip norm and the number of steps; and the last steps,
which nothing corrects any more, have the least of it.
"""

from __future__ import annotations

import math

import tensorflow as tf

from dp2_keras.variables import own_variable


def first_rate(weight_noise: float, noise: float, steps: int) -> float:
    """The rate of the first step, lr_T.

    Args:
        weight_noise: r.
        noise: nu.
        steps: T.

    Example:
    >>> round(first_rate(0.5, noise=0.1, steps=2), 4)
    4.4721
    """
    return weight_noise / (noise * math.sqrt((steps + 1) * (2 * steps + 1) / (6 * steps)))


class Decay:
    """The share of the first rate that a step has: 1 in the first, then less by 1 / T in each.

    Attributes:
        steps: T, a variable; 0 before it is known. It is in no file: every `fit` says it anew.
        first_step: the number of the first of them.

    Example:
    >>> decay = Decay()
    >>> _ = decay.steps.assign(2), decay.first_step.assign(10)
    >>> [float(decay(tf.constant(step))) for step in (10, 11, 12)]
    [1.0, 0.5, 0.0]
    """

    def __init__(self):
        self.steps, self.first_step = own_variable(0, tf.int64), own_variable(0, tf.int64)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """The share of a step, a float32 scalar."""
        passed = tf.cast(step, tf.int64) - self.first_step
        share = 1.0 - tf.cast(passed, tf.float64) / tf.cast(tf.maximum(self.steps, 1), tf.float64)
        return tf.cast(tf.clip_by_value(share, 0.0, 1.0), tf.float32)
