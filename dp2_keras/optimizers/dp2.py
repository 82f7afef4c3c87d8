"""DP²: SGD steps whose private mean becomes the preconditioner of adaptive steps.

    v <- rule(v, G / s1)                    after every s1 SGD steps, G their sum
    w <- w - lr ( sum_i clip(g_i / (sqrt(v) + eps), C) + N(0, (sigma C)^2 I) ) / B

Algorithm 1 of arXiv:2212.00309. The privacy cost is that of DP-SGD with the same noise
multiplier and number of steps: each step releases one Gaussian sum, and the
preconditioner is made of what was released before.

With `bias_correction`, the variance that the noise adds to the mean is taken off:

    m^2 becomes max(m^2 - (sigma C_sgd / B)^2 / s1, 0)
"""

import tensorflow as tf

from dp2_keras import _checks, _keras, preconditioners
from dp2_keras.optimizers.arguments import check_rate
from dp2_keras.optimizers.base import PrivateOptimizer
from dp2_keras.optimizers.rules import Accumulating, MovingAverage
from dp2_keras.privatizer import check_mechanism
from dp2_keras.schedule import DelayedSchedule, Phase


class Delayed(PrivateOptimizer):
    """What the DP² optimizers share: two phases, each with its rate and its clip.

    Args:
        learning_rate: rate of the adaptive phase: float or `LearningRateSchedule`.
        l2_norm_clip: C of the adaptive phase, a bound in the *scaled* space, where norms
            are often ten times larger or more.
        noise_multiplier: sigma, one for both phases.
        delay: s, the number of steps in each phase.
        sgd_steps: s1, steps in the SGD phase, if the two differ.
        adaptive_steps: s2, steps in the adaptive phase, if the two differ.
        sgd_learning_rate: rate of the SGD phase. Defaults to `learning_rate`.
        sgd_l2_norm_clip: C of the SGD phase. Defaults to `l2_norm_clip`.
        bias_correction: take the noise's variance off the squared mean. Defaults to False.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range, and unless either `delay` or both of
            `sgd_steps` and `adaptive_steps` are given.
    """

    def __init__(
        self,
        learning_rate,
        l2_norm_clip,
        noise_multiplier,
        *,
        delay=None,
        sgd_steps=None,
        adaptive_steps=None,
        sgd_learning_rate=None,
        sgd_l2_norm_clip=None,
        bias_correction=False,
        **kwargs,
    ):
        _check_steps(delay, sgd_steps, adaptive_steps)
        _checks.boolean(bias_correction=bias_correction)
        if sgd_l2_norm_clip is not None:
            check_mechanism(noise_multiplier, sgd_l2_norm_clip=sgd_l2_norm_clip)
        if sgd_learning_rate is not None:
            sgd_learning_rate = check_rate(sgd_learning_rate=sgd_learning_rate)
        super().__init__(learning_rate, l2_norm_clip, noise_multiplier, **kwargs)
        self.delay = delay
        self.sgd_steps = sgd_steps
        self.adaptive_steps = adaptive_steps
        self.sgd_l2_norm_clip = sgd_l2_norm_clip
        self.bias_correction = bias_correction
        if isinstance(sgd_learning_rate, float):
            sgd_learning_rate = self.add_scalar(sgd_learning_rate, "sgd_learning_rate")
        self._sgd_learning_rate = sgd_learning_rate

    @property
    def sgd_learning_rate(self):
        """The SGD phase's rate now: a variable, or a schedule's value."""
        rate = self._sgd_learning_rate
        return self._now(self._learning_rate if rate is None else rate)

    @sgd_learning_rate.setter
    def sgd_learning_rate(self, value):
        if not _keras.is_variable(self._sgd_learning_rate):
            raise AttributeError(
                "`sgd_learning_rate` can be set where it was made from a number. Received: "
                f"sgd_learning_rate={value!r}"
            )
        self._sgd_learning_rate.assign(check_rate(sgd_learning_rate=value))

    @property
    def schedule(self) -> DelayedSchedule:
        """When each phase runs."""
        return DelayedSchedule(self.sgd_steps or self.delay, self.adaptive_steps or self.delay)

    def _clip(self, phase):
        if phase is Phase.SGD and self.sgd_l2_norm_clip is not None:
            return self.sgd_l2_norm_clip
        return super()._clip(phase)

    def _rate(self, phase):
        return self.sgd_learning_rate if phase is Phase.SGD else super()._rate(phase)

    def _without_noise_bias(self, squared_mean):
        if not self.bias_correction:
            return squared_mean
        stddev = self._privatizer(Phase.SGD).noise_stddev / self._batch_size
        return tf.maximum(squared_mean - stddev**2 / self._averaged_steps, 0.0)


@_keras.register
class DP2RMSprop(MovingAverage, Delayed):
    """DP²-RMSprop: v <- rho v + (1 - rho) (G / s1)^2.

    Args:
        learning_rate: rate of the adaptive phase: float or `LearningRateSchedule`.
        l2_norm_clip: C of the adaptive phase, in the scaled space.
        noise_multiplier: sigma, the noise's deviation in units of C, for both phases.
        rho: decay of the second moment. Defaults to 0.9.
        eps: the stabiliser, outside the root. Defaults to 1e-7.
        **kwargs: `delay` (or `sgd_steps` and `adaptive_steps`), `sgd_learning_rate`,
            `sgd_l2_norm_clip`, `bias_correction`: see `Delayed`;
            `expected_batch_size`, `noise_seed` and Keras's own: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> optimizer = DP2RMSprop(
    ...     learning_rate=3.0, l2_norm_clip=5.0, sgd_learning_rate=0.1, sgd_l2_norm_clip=0.5,
    ...     noise_multiplier=1.0, delay=195)
    >>> optimizer.schedule
    DelayedSchedule(sgd_steps=195, adaptive_steps=195)

    Reference:
        Li et al., Differentially Private Adaptive Optimization with Delayed
        Preconditioners, https://arxiv.org/abs/2212.00309, 2023. Algorithm 1.
    """

    rule = preconditioners.RMSprop


@_keras.register
class DP2Adagrad(Accumulating, Delayed):
    """DP²-AdaGrad: v <- v + (G / s1)^2.

    Args:
        learning_rate: rate of the adaptive phase: float or `LearningRateSchedule`.
        l2_norm_clip: C of the adaptive phase, in the scaled space.
        noise_multiplier: sigma, the noise's deviation in units of C, for both phases.
        eps: the stabiliser, outside the root. Defaults to 1e-7.
        **kwargs: as in `DP2RMSprop`, but for `rho`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> DP2Adagrad(0.1, 1.0, 1.0, sgd_steps=3, adaptive_steps=5).schedule
    DelayedSchedule(sgd_steps=3, adaptive_steps=5)
    """

    rule = preconditioners.Adagrad


@_keras.register
class DP2Yogi(MovingAverage, Delayed):
    """DP²-Yogi: v <- v - (1 - rho) sign(v - m^2) m^2 with m = G / s1.

    Args:
        learning_rate: rate of the adaptive phase: float or `LearningRateSchedule`.
        l2_norm_clip: C of the adaptive phase, in the scaled space.
        noise_multiplier: sigma, the noise's deviation in units of C, for both phases.
        rho: 1 - rho is how far one refresh moves v. Defaults to 0.9.
        eps: the stabiliser, outside the root. Defaults to 1e-7.
        **kwargs: as in `DP2RMSprop`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> DP2Yogi(0.1, 1.0, 1.0, delay=10).rho
    0.9
    """

    rule = preconditioners.Yogi


def _check_steps(delay, sgd_steps, adaptive_steps):
    apart = (sgd_steps, adaptive_steps)
    if delay is not None and apart == (None, None):
        _checks.positive_integer(delay=delay)
    elif delay is None and None not in apart:
        _checks.positive_integer(sgd_steps=sgd_steps, adaptive_steps=adaptive_steps)
    else:
        raise ValueError(
            "Either `delay`, or both of `sgd_steps` and `adaptive_steps`, must be given. Received: "
            f"delay={delay}, sgd_steps={sgd_steps}, adaptive_steps={adaptive_steps}"
        )
