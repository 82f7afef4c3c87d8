"""DP² whose scale is measured against the noise: coordinates that hold nothing but noise are left alone.

    nu  = sigma C / B                                    the deviation of the noise in g~, which is public
    d   = (1 + u / nu^2)^(-p/2)                          in (0, 1]; 1 before the first refresh
    g~  = ( sum_i clip(d g_i, C) + N(0, (sigma C)^2 I) ) / B
    m  <- m + ((g~^2 - nu^2) / d^2 - m) / (t + 1)        the mean square of the gradients, free of the noise's
    t mod s == 0 : u <- max(m, 0)                        (refresh)
    w  <- w - lr g~
    lr  = r B / (sigma C sqrt(T)),  r = 0.3              "auto": the noise of T steps moves a weight by r

As in Algorithm 1 of arXiv:2212.00309 the scale is made of earlier private gradients, is stale, and stands
before the clip and the noise; it costs nothing. Three things differ. Every release is used for it, those of
adaptive steps too, because what was scaled by a known d can be scaled back. The noise's own square is taken
off, so that u is not a floor of noise. And the scale is relative to the noise: where u << nu^2 it is 1, which
is DP-SGD, and not 1 / sqrt(v), which magnifies what is nothing but noise. So one clip norm and one rate serve
all steps, and there is no eps. The power p lies between DP-SGD (0) and a scale that brings all that is above
the noise down to it (1), which few steps make too slow.

The noise of a weight after T steps has the deviation lr nu sqrt(T), which is public; it is what a rate costs.
So a rate is chosen by the noise one is willing to find in the weights, whatever batch, noise and clip norm.
"""

from __future__ import annotations

import math

import tensorflow as tf

from dp2_keras import _checks, _keras
from dp2_keras.optimizers.rules import EveryStep

WEIGHT_NOISE = 0.3  # r.


@_keras.register
class DP2NoiseFloor(EveryStep):
    """DP² with a scale relative to the noise: d = (1 + u / nu^2)^(-p/2), nu = sigma C / B. Needs no setting.

    Args:
        learning_rate: float or `LearningRateSchedule`, that of DP-SGD. Defaults to "auto": `fit` takes the
            rate with which the noise of all its steps moves a weight by 0.3.
        l2_norm_clip: C, the largest norm an example's scaled gradient may have. The scale is at most 1, so
            that what serves DP-SGD serves here. Defaults to 0.3.
        noise_multiplier: sigma, above 0: without noise there is nothing to measure against. Defaults to
            "auto": `fit` calibrates it to its `PrivacyBudget`.
        delay: s, how many steps a scale is used for. Defaults to 10.
        power: p, from 0, which is DP-SGD, to 1. Defaults to 0.5.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> import dp2_keras as dp2, numpy as np
    >>> model = dp2.DP2Sequential([_keras.keras.Input((2,)), _keras.keras.layers.Dense(1)])
    >>> model.compile(DP2NoiseFloor(), loss="mse")
    >>> budget = dp2.PrivacyBudget(epsilon=2.0, delta=1e-3)
    >>> _ = model.fit(np.ones((100, 2)), np.ones((100, 1)), batch_size=10, callbacks=[budget], verbose=0)
    >>> rate, sigma = float(model.optimizer.learning_rate), model.optimizer.sigma
    >>> bool(np.isclose(rate, 0.3 * 10 / (sigma * 0.3 * 10**0.5)))
    True
    """

    def __init__(
        self,
        learning_rate="auto",
        l2_norm_clip=0.3,
        noise_multiplier="auto",
        *,
        delay=10,
        power=0.5,
        **kwargs,
    ):
        _checks.positive_integer(delay=delay)
        _checks.closed_unit(power=power)
        if noise_multiplier == 0:
            rule = "above 0: the scale is relative to the noise. Without noise, use DP2RMSprop"
            _checks.fail(rule, noise_multiplier=noise_multiplier)
        is_auto = isinstance(learning_rate, str) and learning_rate == "auto"
        super().__init__(0.0 if is_auto else learning_rate, l2_norm_clip, noise_multiplier, **kwargs)
        self.delay = delay
        self.power = power
        self._rate_is_auto, self._awaits_rate = is_auto, is_auto
        self._mean_squares = None

    @property
    def scales_before_noise(self):
        return True

    def settle_rate(self, steps):
        if not self._rate_is_auto:
            return
        if steps is None:
            raise ValueError(
                '`steps_per_epoch` must be given for `learning_rate="auto"`, which depends on the number of '
                "steps. Received: steps_per_epoch=None"
            )
        self._learning_rate.assign(WEIGHT_NOISE / math.sqrt(self._floor * steps))
        self._awaits_rate = False

    def __setattr__(self, name, value):
        if name == "learning_rate":  # Of the user's, or of a callback's: it stays.
            self._rate_is_auto = self._awaits_rate = False
        super().__setattr__(name, value)

    def _check_can_step(self, variables):
        super()._check_can_step(variables)
        if self._awaits_rate:
            raise ValueError(
                '`learning_rate="auto"` is settled by `fit` of a private model, which knows how many steps '
                "there will be: call that first, or give a number."
            )

    def _argument(self, name):
        return "auto" if name == "learning_rate" and self._rate_is_auto else super()._argument(name)

    def build(self, variables):
        if self.is_built():
            return
        super().build(variables)
        self._second_moments = self.add_state(variables, "second_moment")
        self._mean_squares = self.add_state(variables, "mean_square")

    @property
    def _floor(self):
        """nu^2."""
        return (self.sigma * self.l2_norm_clip / self._batch_size) ** 2

    def _scale(self, variable):
        above_noise = self._state(self._second_moments, variable) / self._floor
        return tf.pow(1.0 + above_noise, -self.power / 2.0)

    def _directions(self, variables, gradients):
        for gradient, variable in zip(gradients, variables):
            self._observe(gradient, variable)
        due = self._step() % self.delay == 0
        tf.cond(due, lambda: self._refresh(variables), lambda: None)
        return gradients

    def _observe(self, gradient, variable):
        mean, scale = self._state(self._mean_squares, variable), self._scale(variable)
        square = (tf.square(gradient) - self._floor) / tf.square(scale)
        mean.assign_add((square - mean) / tf.cast(self._step() + 1, mean.dtype))

    def _refresh(self, variables):
        for variable in variables:
            mean = self._state(self._mean_squares, variable)
            self._state(self._second_moments, variable).assign(tf.maximum(mean, 0.0))
