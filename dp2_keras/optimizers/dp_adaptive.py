"""Adaptive methods that are not delayed: add noise, then scale by what is noisy.

    v <- rule(v, g~);   w <- w - lr g~ / (sqrt(v) + eps)

the paper's baselines, whose preconditioner the noise ruins. DP-Adam also keeps a first
moment, m <- beta_1 m + (1 - beta_1) g~, and debiases both:

    w <- w - lr m^ / (sqrt(v^) + eps),   m^ = m / (1 - beta_1^t),  v^ = v / (1 - beta_2^t)
"""

from dp2_keras import _checks, _keras, preconditioners
from dp2_keras.optimizers.rules import Accumulating, EveryStep, MovingAverage


@_keras.register
class DPRMSprop(MovingAverage, EveryStep):
    """RMSprop on private gradients.

    Args:
        learning_rate: float or `LearningRateSchedule`.
        l2_norm_clip: C, the largest norm an example's gradient may have.
        noise_multiplier: sigma, the noise's deviation in units of C.
        rho: decay of the second moment. Defaults to 0.9.
        eps: the stabiliser, outside the root. Defaults to 1e-7.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> DPRMSprop(learning_rate=0.01, l2_norm_clip=1.0, noise_multiplier=1.0).rho
    0.9
    """

    rule = preconditioners.RMSprop


@_keras.register
class DPAdagrad(Accumulating, EveryStep):
    """AdaGrad on private gradients.

    Args:
        learning_rate: float or `LearningRateSchedule`.
        l2_norm_clip: C, the largest norm an example's gradient may have.
        noise_multiplier: sigma, the noise's deviation in units of C.
        eps: the stabiliser, outside the root. Defaults to 1e-7.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> DPAdagrad(learning_rate=0.01, l2_norm_clip=1.0, noise_multiplier=1.0).eps
    1e-07
    """

    rule = preconditioners.Adagrad


@_keras.register
class DPYogi(MovingAverage, EveryStep):
    """Yogi on private gradients: v <- v - (1 - rho) sign(v - g~^2) g~^2.

    Args:
        learning_rate: float or `LearningRateSchedule`.
        l2_norm_clip: C, the largest norm an example's gradient may have.
        noise_multiplier: sigma, the noise's deviation in units of C.
        rho: 1 - rho is how far one step moves v. Defaults to 0.9.
        eps: the stabiliser, outside the root. Defaults to 1e-7.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> DPYogi(learning_rate=0.01, l2_norm_clip=1.0, noise_multiplier=1.0).rho
    0.9
    """

    rule = preconditioners.Yogi


@_keras.register
class DPAdam(EveryStep):
    """Adam on private gradients.

    Args:
        learning_rate: float or `LearningRateSchedule`.
        l2_norm_clip: C, the largest norm an example's gradient may have.
        noise_multiplier: sigma, the noise's deviation in units of C.
        beta_1: decay of the first moment. Defaults to 0.9.
        beta_2: decay of the second moment. Defaults to 0.999.
        eps: the stabiliser, outside the root. Defaults to 1e-7.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> DPAdam(learning_rate=0.01, l2_norm_clip=1.0, noise_multiplier=1.0).beta_2
    0.999
    """

    def __init__(
        self, learning_rate, l2_norm_clip, noise_multiplier, *, beta_1=0.9, beta_2=0.999, eps=1e-7, **kwargs
    ):
        _checks.fraction(beta_1=beta_1, beta_2=beta_2)
        _checks.positive(eps=eps)
        super().__init__(learning_rate, l2_norm_clip, noise_multiplier, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.eps = eps

    @property
    def preconditioner(self):
        return preconditioners.RMSprop(self.eps, self.beta_2, debias=True)

    @property
    def first_moment_decay(self):
        return self.beta_1
