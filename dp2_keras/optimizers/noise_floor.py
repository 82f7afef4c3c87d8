"""DP² whose scale is measured against the noise: coordinates that hold nothing but noise are left alone.

    nu  = sigma C / B                                    the deviation of the noise in g~, which is public
    d   = nu / sqrt(u + nu^2)                            in (0, 1]; 1 before the first refresh
    g~  = ( sum_i clip(d g_i, C) + N(0, (sigma C)^2 I) ) / B
    m  <- m + ((g~^2 - nu^2) / d^2 - m) / (t + 1)        the mean square of the gradients, free of the noise's
    t mod s == 0 : u <- max(m, 0)                        (refresh)
    w  <- w - lr g~

As in Algorithm 1 of arXiv:2212.00309 the scale is made of earlier private gradients, is stale, and stands
before the clip and the noise; it costs nothing. Three things differ. Every release is used for it, those of
adaptive steps too, because what was scaled by a known d can be scaled back. The noise's own square is taken
off, so that u is not a floor of noise. And the scale is relative to the noise: where u << nu^2 it is 1, which
is DP-SGD, and not 1 / sqrt(v), which magnifies what is nothing but noise. So one clip norm and one rate serve
all steps, and there is no eps.
"""

from __future__ import annotations

import tensorflow as tf

from dp2_keras import _checks, _keras
from dp2_keras.optimizers.rules import EveryStep


@_keras.register
class DP2NoiseFloor(EveryStep):
    """DP² with a scale relative to the noise: d = nu / sqrt(u + nu^2), nu = sigma C / B.

    Args:
        learning_rate: float or `LearningRateSchedule`, that of DP-SGD.
        l2_norm_clip: C, the largest norm an example's scaled gradient may have. The scale is at most 1, so
            that what serves DP-SGD serves here.
        noise_multiplier: sigma, above 0: without noise there is nothing to measure against.
        delay: s, how many steps a scale is used for. Defaults to 10.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> DP2NoiseFloor(learning_rate=0.5, l2_norm_clip=1.0, noise_multiplier=1.0).delay
    10
    """

    def __init__(self, learning_rate, l2_norm_clip, noise_multiplier, *, delay=10, **kwargs):
        _checks.positive_integer(delay=delay)
        if noise_multiplier == 0:
            rule = "above 0: the scale is relative to the noise. Without noise, use DP2RMSprop"
            _checks.fail(rule, noise_multiplier=noise_multiplier)
        super().__init__(learning_rate, l2_norm_clip, noise_multiplier, **kwargs)
        self.delay = delay
        self._mean_squares = None

    @property
    def scales_before_noise(self):
        return True

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
        return tf.math.rsqrt(1.0 + self._state(self._second_moments, variable) / self._floor)

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
