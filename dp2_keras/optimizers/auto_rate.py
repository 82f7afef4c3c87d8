"""How a learning rate falls to 0, and where it begins, by the noise that it leaves in the weights.

    lr_j = r j / (nu sqrt(1^2 + ... + T^2)),   j = T, T - 1, ..., 1 steps left
    sum_j (lr_j nu)^2 = r^2

nu is the deviation of the noise in one step's gradient. So the noise of all T steps moves the path of a
weight by r, whatever the batch size, the noise multiplier, the clip norm and the number of steps; and the
last steps, which nothing corrects any more, have the least of it.
"""

from __future__ import annotations

import math

import tensorflow as tf

from dp2_keras import _checks, _keras
from dp2_keras.optimizers.base import PrivateOptimizer
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


class AutoRate(PrivateOptimizer):
    """A rate that `fit` settles, and that stays what a user or a callback makes of it.

    Args:
        learning_rate: float, `LearningRateSchedule`, or "auto".
        l2_norm_clip: C.
        noise_multiplier: sigma.
        weight_noise: r.
        **kwargs: see `PrivateOptimizer`.
    """

    def __init__(self, learning_rate, l2_norm_clip, noise_multiplier, *, weight_noise, **kwargs):
        _checks.positive(weight_noise=weight_noise)
        is_auto = isinstance(learning_rate, str) and learning_rate == "auto"
        super().__init__(0.0 if is_auto else learning_rate, l2_norm_clip, noise_multiplier, **kwargs)
        self.weight_noise = weight_noise
        self._may_be_auto, self._decay = is_auto, Decay()
        self._settled_rate = self.add_scalar(0.0, "settled_rate")
        self._fit_steps = self._fit_rate = None

    @property
    def _floor(self):
        """nu^2."""
        return (self.sigma * self.l2_norm_clip / self._batch_size) ** 2

    @property
    def _is_auto(self):
        return self._may_be_auto and bool(self._is_settled())

    def _is_settled(self):
        """Whether the rate is what `fit` made it, and not what a user or a callback has set."""
        if not _keras.is_variable(self._learning_rate):
            return False  # A schedule.
        settled = tf.convert_to_tensor(_keras.native(self._settled_rate))
        rate = tf.cast(_keras.native(self._learning_rate), settled.dtype)
        return tf.logical_or(tf.equal(rate, settled), tf.equal(rate, 0.0))  # 0: new; Keras 2 saves no rate.

    def settle_rate(self, steps):
        self._fit_steps, self._fit_rate = steps, None
        if not self._is_auto:
            return
        if steps is None:
            raise ValueError(
                '`steps_per_epoch` must be given for `learning_rate="auto"`, which depends on the number of '
                "steps. Received: steps_per_epoch=None"
            )
        self._spread_rate(steps)

    def start_rate(self, first_step):
        idle = self._idle_steps(first_step)
        self._decay.first_step.assign(first_step + idle)
        if idle and self._fit_rate is not None and self._rate_now() in self._settled_rates():
            self._spread_rate(max(self._fit_steps - idle, 1))

    def _idle_steps(self, first_step):
        """How many of the first steps of the fit move nothing."""
        del first_step
        return 0

    def _spread_rate(self, steps):
        """Rates for that many steps that move the weights."""
        rate = first_rate(self.weight_noise, self._floor**0.5, steps)
        for variable in (self._learning_rate, self._settled_rate):
            variable.assign(rate)
        self._decay.steps.assign(steps)
        self._fit_rate = self._rate_now()

    def _rate_now(self):
        return float(self._learning_rate.numpy())

    def _settled_rates(self):
        """This fit's, and that of a fit that a backup goes on with; any other was set by a callback."""
        return self._fit_rate, float(self._settled_rate.numpy())

    def check_single_step(self):
        if self._is_auto:
            raise ValueError(
                '`learning_rate="auto"` is settled by `fit` of a private model, which knows how many steps '
                "there will be. For a step of your own, give a number: `optimizer.learning_rate = ...`."
            )

    def _check_can_step(self, variables):
        super()._check_can_step(variables)
        with tf.init_scope():
            if not self._decay.steps.numpy():
                self.check_single_step()

    def _rate(self, phase):
        rate = tf.cast(_keras.native(super()._rate(phase)), tf.float32)
        if not self._may_be_auto:
            return rate
        return tf.where(self._is_settled(), rate * self._decay(self._step()), rate)

    def _argument(self, name):
        return "auto" if name == "learning_rate" and self._is_auto else super()._argument(name)
