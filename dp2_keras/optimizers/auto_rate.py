"""A learning rate chosen by the noise that it leaves in the weights.

    lr_j = r j / (nu sqrt(1^2 + ... + T^2)),   j = T, T - 1, ..., 1 steps left
    sum_j (lr_j nu)^2 = r^2

nu is the deviation of the noise in one step's gradient. So the noise of all T steps moves a weight by r,
whatever the batch size, the noise multiplier, the clip norm and the number of steps; and the last steps,
which nothing corrects any more, have the least of it.
"""

from __future__ import annotations

import math

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.variables import own_variable


class AutoRate(_keras.keras.optimizers.schedules.LearningRateSchedule):
    """A linear decay to 0 that is settled when the number of steps is known; 0 before.

    Example:
    >>> rate = AutoRate()
    >>> rate.settle(weight_noise=0.5, noise=0.1, steps=2, first_step=10)
    >>> [round(float(rate(step)), 4) for step in (10, 11, 12)]
    [4.4721, 2.2361, 0.0]
    """

    def __init__(self):
        super().__init__()
        self._terms = own_variable([0.0, 1.0, 0.0], tf.float64)  # The first rate, T, the first step.
        self.is_settled = False
        self.is_given = False

    def settle(self, weight_noise: float, noise: float, steps: int, first_step: int) -> None:
        """Settles the rates of the coming steps.

        Args:
            weight_noise: r.
            noise: nu.
            steps: T.
            first_step: the number of the first of them.
        """
        squares = (steps + 1) * (2 * steps + 1) / (6 * steps)  # Of j / T.
        self._terms.assign([weight_noise / (noise * math.sqrt(squares)), steps, first_step])
        self.is_settled = True

    def give(self, rate: float) -> None:
        """Takes a constant instead, which stays."""
        self._terms.assign([rate, math.inf, 0.0])
        self.is_settled = self.is_given = True

    @property
    def first(self) -> float:
        """The rate of the first step."""
        return float(self._terms[0])

    def __call__(self, step):
        """The rate of a step."""
        first, steps, first_step = tf.unstack(tf.convert_to_tensor(self._terms))
        passed = tf.cast(step, tf.float64) - first_step
        return tf.cast(first * tf.clip_by_value(1.0 - passed / steps, 0.0, 1.0), tf.float32)

    def get_config(self):
        """Nothing: an optimizer's config says "auto"."""
        return {}
