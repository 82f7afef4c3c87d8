"""DP-SGD: scale 1 in every step.

w <- w - lr ( sum_i clip(g_i, C) + N(0, (sigma C)^2 I) ) / B
"""

from dp2_keras import _keras
from dp2_keras.optimizers.base import PrivateOptimizer


@_keras.register
class DPSGD(PrivateOptimizer):
    """Differentially private stochastic gradient descent.

    With `l2_norm_clip=inf` and `noise_multiplier=0` it is Keras's SGD.

    Args:
        learning_rate: float or `LearningRateSchedule`.
        l2_norm_clip: C, the largest norm an example's gradient may have.
        noise_multiplier: sigma, the noise's deviation in units of C.
        **kwargs: `expected_batch_size`, `noise_seed`, `weight_decay`, `use_ema`,
            `ema_momentum`, `ema_overwrite_frequency`, `num_microbatches`, `name`: see
            `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> optimizer = DPSGD(learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=1.1)
    >>> optimizer.noise_multiplier
    1.1

    Reference:
        Abadi et al., Deep Learning with Differential Privacy,
        https://arxiv.org/abs/1607.00133, 2016.
    """
