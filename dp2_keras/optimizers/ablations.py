"""The paper's two ablations of DP²: what its order, and its one release per step, are worth.

    noise first    g~ = ( sum_i clip(g_i, C) + N(0, (sigma C)^2 I) ) / (B D)
    extra query    g~ as in DP-SGD in every step, for v alone;
                   g^ = ( sum_i clip(g_i / D, C_2) + N(0, (sigma C_2)^2 I) ) / B in all but refresh steps

with D = sqrt(v) + eps in adaptive steps. Noise first ("variant 2", Appendix "Algorithms" of arXiv:2212.00309)
scales the noise with the gradient. Extra query ("variant 1", its Algorithm 2) is adaptive in all but one of
`delay` steps, and pays for it: it asks every batch twice.
"""

from __future__ import annotations

import tensorflow as tf

from dp2_keras import _checks, _keras
from dp2_keras.optimizers.dp2 import Delayed, DP2Adagrad, DP2RMSprop
from dp2_keras.privatizer import ClippingQuery, JointQuery
from dp2_keras.schedule import DelayedSchedule, Phase


class NoiseFirst(Delayed):
    """DP² that scales after the noise. One `l2_norm_clip`, of gradients as they are, serves both phases."""

    @property
    def scales_before_noise(self):
        return False


class ExtraQuery(Delayed):
    """DP² that takes an adaptive step in all but one of `delay` steps, from a second release.

    Its price is that of two releases on each batch; a refresh step makes one, and is priced as if it made
    both.

    Raises:
        ValueError: unless `delay` is given, and at least 2.
    """

    def __init__(self, learning_rate, l2_norm_clip, noise_multiplier, *, delay, **kwargs):
        _checks.positive_integer(delay=delay)
        if delay < 2:
            _checks.fail("at least 2: the first of `delay` steps is not adaptive", delay=delay)
        super().__init__(learning_rate, l2_norm_clip, noise_multiplier, delay=delay, **kwargs)

    @property
    def schedule(self):
        return DelayedSchedule(sgd_steps=1, adaptive_steps=self.delay - 1)

    @property
    def _averaged_steps(self):
        # The first step refreshes v from its own gradient alone. (The paper divides by s even there, and its
        # code does not.)
        return tf.where(self._step() == 0, 1.0, float(self.delay))

    def noise_multipliers(self, sigma):
        return (sigma, sigma)

    def _query(self, variables):
        return JointQuery([ClippingQuery(variables, None, self._clip(Phase.SGD)), super()._query(variables)])

    def _directions(self, variables, gradients, scaled):
        for gradient, variable in zip(gradients, variables):
            self._state(self._gradient_sums, variable).assign_add(gradient)
        self._refresh_if_due(variables)
        adaptive = self.schedule.is_adaptive(self._step())
        return tf.cond(adaptive, lambda: list(scaled), lambda: list(gradients))


@_keras.register
class DP2RMSpropNoiseFirst(NoiseFirst, DP2RMSprop):
    """DP²-RMSprop that adds the noise, then scales: the paper's ablation variant 2.

    Args:
        learning_rate: rate of the adaptive phase: float or `LearningRateSchedule`.
        l2_norm_clip: C of both phases, of gradients that are not scaled.
        noise_multiplier: sigma, the noise's deviation in units of C.
        **kwargs: as in `DP2RMSprop`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> DP2RMSpropNoiseFirst(0.3, 0.25, 1.0, sgd_learning_rate=0.3, delay=780, eps=1e-3).scales_before_noise
    False
    """


@_keras.register
class DP2AdagradNoiseFirst(NoiseFirst, DP2Adagrad):
    """DP²-AdaGrad that adds the noise, then scales.

    Args:
        learning_rate: rate of the adaptive phase: float or `LearningRateSchedule`.
        l2_norm_clip: C of both phases, of gradients that are not scaled.
        noise_multiplier: sigma, the noise's deviation in units of C.
        **kwargs: as in `DP2Adagrad`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> DP2AdagradNoiseFirst(0.3, 0.25, 1.0, delay=10).scales_before_noise
    False
    """


@_keras.register
class DP2RMSpropExtraQuery(ExtraQuery, DP2RMSprop):
    """DP²-RMSprop with a second release in every step: the paper's ablation variant 1.

    Args:
        learning_rate: rate of the adaptive steps: float or `LearningRateSchedule`.
        l2_norm_clip: C of the adaptive steps, in the scaled space.
        noise_multiplier: sigma, of each of the two releases.
        delay: s, at least 2: v is refreshed in one of s steps.
        **kwargs: `sgd_learning_rate`, `sgd_l2_norm_clip` and others as in `DP2RMSprop`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> optimizer = DP2RMSpropExtraQuery(0.1, 2.0, 1.0, sgd_l2_norm_clip=0.5, delay=780)
    >>> f"{optimizer.dp_event().noise_multiplier:.4f}"  # Of both releases together.
    '0.7071'
    """


@_keras.register
class DP2AdagradExtraQuery(ExtraQuery, DP2Adagrad):
    """DP²-AdaGrad with a second release in every step.

    Args:
        learning_rate: rate of the adaptive steps: float or `LearningRateSchedule`.
        l2_norm_clip: C of the adaptive steps, in the scaled space.
        noise_multiplier: sigma, of each of the two releases.
        delay: s, at least 2: v is refreshed in one of s steps.
        **kwargs: `sgd_learning_rate`, `sgd_l2_norm_clip` and others as in `DP2Adagrad`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> DP2AdagradExtraQuery(0.1, 2.0, 1.0, delay=10).schedule
    DelayedSchedule(sgd_steps=1, adaptive_steps=9)
    """
