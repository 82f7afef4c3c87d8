"""Methods that take the geometry of the gradients from public data, and so pay nothing for it.

    AdaDPS     v <- rule(v, p),  D = sqrt(v) + eps,   p the mean gradient of a batch of public rows
               g~ = ( sum_i clip(g_i / D, C) + N(0, (sigma C)^2 I) ) / B
               w <- w - lr g~
    PDA-DPMD   g~ as in DP-SGD
               w <- w - lr ( alpha_t g~ + (1 - alpha_t) p ),   alpha_t = cos(pi/2 min(t / K, 1))

AdaDPS is Li et al. 2022 (arXiv:2202.05963), v refreshed in every step before it is used; D may also come from
statistics that are public, such as how often a feature occurs. PDA-DPMD is Amid et al. 2021
(arXiv:2112.00193) in its practical form: with the public loss as the mirror map, a step goes, to first order,
along a mix of both gradients. Both are baselines of arXiv:2212.00309, section "DP2 compared with recent
methods for private optimization".

What is public stands outside the clip and the noise. The scale of AdaDPS is part of the sensitivity, as any
scale is: whatever the public data, one example changes the sum by at most C.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from dp2_keras import _checks, _keras, preconditioners
from dp2_keras.optimizers.base import PrivateOptimizer
from dp2_keras.optimizers.rules import Accumulating, EveryStep, MovingAverage
from dp2_keras.privatizer import ClippingQuery


class PublicScale(EveryStep):
    """What the AdaDPS optimizers share: a scale from public data, before the clip and the noise.

    Args:
        public_second_moments: v itself, from public statistics, in place of public data: an array per
            trainable variable, of its shape, or a function that maps a variable to its array. It is never
            refreshed. Arrays are a part of the config; where they are large, give a function that is
            registered with Keras. Defaults to None: v from the `public_data` of `compile`.

    Raises:
        ValueError: for a value out of range.
    """

    def __init__(
        self, learning_rate, l2_norm_clip, noise_multiplier, *, public_second_moments=None, **kwargs
    ):
        if public_second_moments is not None and not callable(public_second_moments):
            public_second_moments = _plain_lists(public_second_moments)
        super().__init__(learning_rate, l2_norm_clip, noise_multiplier, **kwargs)
        # Keras would look for variables in every list of the lists.
        object.__setattr__(self, "public_second_moments", public_second_moments)

    @property
    def public_gradients(self):
        return "mean" if self.public_second_moments is None else None

    @property
    def uses_public_data(self):
        return True

    @property
    def scales_before_noise(self):
        return True

    def build(self, variables):
        was_built = self.is_built()
        super().build(variables)
        if not was_built and self.public_second_moments is not None:
            for state, value in zip(self._second_moments, self._given_moments(list(variables))):
                state.assign(value)

    def _given_moments(self, variables):
        given = self.public_second_moments
        values = [given(v) for v in variables] if callable(given) else given
        values = [np.asarray(value, np.float32) for value in values]
        shapes, expected = [v.shape for v in values], [tuple(v.shape) for v in variables]
        if shapes != expected:
            raise ValueError(
                "`public_second_moments` must have an array per trainable variable, of its shape. Received: "
                f"shapes {shapes} for variables of shapes {expected}"
            )
        _check_moments(values)
        return values

    def _query(self, variables):
        moments = self._refreshed(variables)
        scales = lambda: [self.preconditioner.scale(v, refreshes=self._step() + 1) for v in moments]  # noqa: E731
        return ClippingQuery(variables, scales, self.l2_norm_clip)

    def _refreshed(self, variables):
        """v of this step, which is not noted before the step is finished."""
        moments = [tf.convert_to_tensor(self._state(self._second_moments, v)) for v in variables]
        if self._public is None:
            return moments
        refresh = self.preconditioner.refresh
        return [refresh(v, tf.square(tf.cast(p, v.dtype))) for v, p in zip(moments, self._public.values)]

    def _directions(self, variables, gradients):
        for variable, moment in zip(variables, self._refreshed(variables)):
            self._state(self._second_moments, variable).assign(moment)
        return gradients


def _plain_lists(arrays):
    if not isinstance(arrays, (list, tuple)):
        _checks.fail("a list of arrays, or a function of a variable", public_second_moments=arrays)
    arrays = [np.asarray(array, np.float64) for array in arrays]
    _check_moments(arrays)
    return [array.tolist() for array in arrays]


def _check_moments(arrays):
    for array in arrays:
        if not np.all(np.isfinite(array) & (array >= 0)):
            _checks.fail("finite numbers of at least 0, being means of squares", public_second_moments=array)


@_keras.register
class AdaDPSRMSprop(MovingAverage, PublicScale):
    """AdaDPS with RMSprop's rule: v <- rho v + (1 - rho) p^2, p the gradient of public data.

    Compile the model with `public_data=(x, y)`, unless `public_second_moments` is given.

    Args:
        learning_rate: float or `LearningRateSchedule`.
        l2_norm_clip: C, a bound in the *scaled* space.
        noise_multiplier: sigma, the noise's deviation in units of C.
        rho: decay of the second moment. Defaults to 0.9.
        eps: the stabiliser, outside the root. Defaults to 1e-7.
        public_second_moments: v from public statistics: an array per trainable variable, or a function that
            maps a variable to its array. Defaults to None: v from public data.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> optimizer = AdaDPSRMSprop(learning_rate=1.0, l2_norm_clip=5.0, noise_multiplier=1.0, eps=1e-3)
    >>> optimizer.public_gradients, optimizer.scales_before_noise
    ('mean', True)

    Reference:
        Li et al., Private Adaptive Optimization with Side Information,
        https://arxiv.org/abs/2202.05963, 2022.
    """

    rule = preconditioners.RMSprop


@_keras.register
class AdaDPSAdagrad(Accumulating, PublicScale):
    """AdaDPS with AdaGrad's rule: v <- v + p^2, p the gradient of public data.

    Args:
        learning_rate: float or `LearningRateSchedule`.
        l2_norm_clip: C, a bound in the *scaled* space.
        noise_multiplier: sigma, the noise's deviation in units of C.
        eps: the stabiliser, outside the root. Defaults to 1e-7.
        public_second_moments: as in `AdaDPSRMSprop`.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> statistics = [[[1.0], [0.25]], [1.0]]  # Of the kernel and the bias of Dense(1), on two features.
    >>> AdaDPSAdagrad(0.1, 1.0, 1.0, public_second_moments=statistics).public_gradients is None
    True
    """

    rule = preconditioners.Adagrad


@_keras.register
class PDADPMD(PrivateOptimizer):
    """DP-SGD whose steps lean more and more on the gradient of public data.

    w <- w - lr (alpha_t g~ + (1 - alpha_t) p), where p is the gradient of public data and
    alpha_t = cos(pi/2 min(t / K, 1)) falls from 1 in the first step to 0 after K steps, or is constant.
    Compile the model with `public_data=(x, y)`.

    Args:
        learning_rate: float or `LearningRateSchedule`.
        l2_norm_clip: C, the largest norm an example's gradient may have.
        noise_multiplier: sigma, the noise's deviation in units of C.
        total_steps: K, normally the number of steps of the whole run.
        alpha: the weight of the private gradient, from 0 to 1, if it is to be constant.
        **kwargs: see `PrivateOptimizer`.

    Raises:
        ValueError: for a value out of range, and unless one of `total_steps` and `alpha` is given.

    Example:
    >>> optimizer = PDADPMD(learning_rate=5.0, l2_norm_clip=0.5, noise_multiplier=1.0, total_steps=39_000)
    >>> float(optimizer.private_weight())  # Of the first step.
    1.0

    Reference:
        Amid et al., Public Data-Assisted Mirror Descent for Private Model Training,
        https://arxiv.org/abs/2112.00193, 2021.
    """

    def __init__(
        self, learning_rate, l2_norm_clip, noise_multiplier, *, total_steps=None, alpha=None, **kwargs
    ):
        if (total_steps is None) == (alpha is None):
            raise ValueError(
                "Either `total_steps` or `alpha` must be given, and not both. Received: "
                f"total_steps={total_steps}, alpha={alpha}"
            )
        if total_steps is not None:
            _checks.positive_integer(total_steps=total_steps)
        elif not _checks.is_number(alpha) or not 0 <= alpha <= 1:
            _checks.fail("at least 0 and at most 1", alpha=alpha)
        super().__init__(learning_rate, l2_norm_clip, noise_multiplier, **kwargs)
        self.total_steps = total_steps
        self.alpha = alpha

    @property
    def public_gradients(self):
        return "mean"

    def private_weight(self) -> tf.Tensor:
        """alpha_t of the coming step."""
        if self.alpha is not None:
            return tf.constant(self.alpha, tf.float32)
        done = tf.minimum(tf.cast(self._step() / self.total_steps, tf.float32), 1.0)
        return tf.cos(math.pi / 2 * done)

    def _directions(self, variables, gradients):
        del variables
        alpha, public = self.private_weight(), self._public.values
        mix = lambda g, p: tf.cast(alpha, g.dtype) * g + tf.cast(1.0 - alpha, g.dtype) * tf.cast(p, g.dtype)  # noqa: E731
        return [mix(g, p) for g, p in zip(gradients, public)]
