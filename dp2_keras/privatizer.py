"""The Gaussian mechanism of one step: scale, clip, sum, add noise, divide.

    g~ = ( sum_i c_i S g_i + N(0, (sigma C)^2 I) ) / B,   c_i = min(1, C / ||S g_i||)

(the line "Privatize the (preconditioned) gradients" of Algorithm 1 in
arXiv:2212.00309). The norm is over all trainable variables of one example, and the
scale S stands inside it: it is part of the sensitivity. B is the public expected
batch size, never the number of examples drawn.

Guarantees: adding or removing one example changes the sum by at most C in L2 norm,
replacing one by at most 2C. An example whose scaled gradient is not finite, or that is
masked out as padding, is left out of the sum by selection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from dp2_keras import _checks, noise


@dataclasses.dataclass(frozen=True)
class GaussianPrivatizer:
    """One clip norm and one noise multiplier.

    Args:
        l2_norm_clip: C, greater than 0; infinity means no clipping.
        noise_multiplier: sigma, the noise's deviation in units of C; at least 0.

    Raises:
        ValueError: for values out of range, and for an infinite clip norm with noise,
            which would be infinite too.

    Example:
    >>> GaussianPrivatizer(l2_norm_clip=0.5, noise_multiplier=2.0).noise_stddev
    1.0
    """

    l2_norm_clip: float
    noise_multiplier: float

    def __post_init__(self):
        check_mechanism(self.noise_multiplier, l2_norm_clip=self.l2_norm_clip)

    @property
    def noise_stddev(self) -> float:
        """sigma C, the deviation of the noise in the *sum*; 0 without noise."""
        return self.noise_multiplier * self.l2_norm_clip if self.noise_multiplier else 0.0


def check_mechanism(noise_multiplier: float | str, **clip) -> None:
    """Refuses a clip norm and a noise multiplier (or "auto") that have no meaning, or none together."""
    _checks.clip_norm(**clip)
    if noise_multiplier != "auto":
        _checks.non_negative(noise_multiplier=noise_multiplier)
    if noise_multiplier != 0 and float("inf") in clip.values():
        rule = "finite when there is noise: noise for an unbounded gradient is infinite"
        _checks.fail(rule, **clip, noise_multiplier=noise_multiplier)


@dataclasses.dataclass(frozen=True, eq=False)
class ClippingQuery:
    """What one step may ask of the data: a sum of gradients, scaled and clipped.

    Attributes:
        variables: the trainable variables, in the order of all lists below.
        scales: per variable what multiplies the gradient before the clip, or None
            for 1 everywhere.
        l2_norm_clip: scalar tensor or float, C.
    """

    variables: Sequence
    scales: Sequence[tf.Tensor] | None
    l2_norm_clip: tf.Tensor | float

    def zeros(self) -> list[tf.Tensor]:
        """The sum over no examples."""
        return [tf.zeros(v.shape, compute_dtype(v.dtype)) for v in self.variables]

    def clip(self, per_example_gradients: Sequence[tf.Tensor], mask: tf.Tensor):
        """Scales, clips and sums gradients whose leading axis is the example.

        Args:
            per_example_gradients: one tensor per variable, of shape [n, *variable].
            mask: bool [n]; False is padding.

        Returns:
            The summed tensors, and the norms [n] of the scaled gradients, 0 where the
            example was left out.
        """
        scaled = [self._scaled(g, k) for k, g in enumerate(per_example_gradients)]
        norms = tf.cast(tf.sqrt(tf.add_n([_squared_norms(g) for g in scaled])), tf.float32)
        kept = tf.math.is_finite(norms) & mask
        norms = tf.where(kept, norms, tf.zeros_like(norms))
        factors = self.clip_factors(norms)
        sums = [_weighted_sum(factors, g, kept) for g in scaled]
        for value, variable in zip(sums, self.variables):
            value.set_shape(variable.shape)  # A map over an unknown number of examples forgets it.
        return sums, norms

    def clip_factors(self, norms: tf.Tensor) -> tf.Tensor:
        """min(1, C / norm), without dividing by zero or infinity by infinity."""
        clip = tf.cast(self.l2_norm_clip, norms.dtype)
        return tf.where(norms > clip, clip / tf.maximum(norms, clip), tf.ones_like(norms))

    def _scaled(self, gradients, index):
        gradients = tf.cast(gradients, compute_dtype(gradients.dtype))
        if self.scales is None:
            return gradients
        return gradients * tf.cast(self.scales[index], gradients.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedSum:
    """The answer to a `ClippingQuery`, and the only thing a private step accepts.

    Attributes:
        query: the query it answers; its `l2_norm_clip` is the sensitivity.
        values: one summed tensor per variable, not yet noised.
    """

    query: ClippingQuery
    values: Sequence[tf.Tensor]


def add_noise(
    clipped: ClippedSum,
    stddev: tf.Tensor,
    source: noise.NoiseSource,
    draw: tf.Tensor,
    stream: int,
    indices: Sequence[int],
) -> list[tf.Tensor]:
    """Adds N(0, stddev^2 I) to a clipped sum.

    Args:
        clipped: the sum.
        stddev: scalar, sigma C of the step's phase.
        source, draw, stream: where the noise comes from; see `noise.py`.
        indices: a number per variable that is the same in every step.
    """
    return [
        value + tf.cast(stddev * source.normal(value.shape, draw, stream=stream, variable=i), value.dtype)
        for i, value in zip(indices, clipped.values)
    ]


def compute_dtype(dtype) -> tf.DType:
    """What gradients of that dtype are clipped and noised in: at least float32."""
    dtype = tf.as_dtype(dtype)
    return dtype if dtype.size >= 4 else tf.float32


def _squared_norms(gradients):
    """Sums of squares per example; float64 across rows, where float32 would lose digits."""
    rows = tf.square(gradients)
    if gradients.shape.rank > 1:
        rows = tf.reduce_sum(rows, axis=-1)
    return tf.reduce_sum(tf.cast(rows, tf.float64), axis=list(range(1, rows.shape.rank)))


def _weighted_sum(factors, gradients, kept):
    """sum_i factors_i gradients_i over the kept examples; 0 * NaN never happens."""
    column = [-1] + [1] * (gradients.shape.rank - 1)
    gradients = tf.where(tf.reshape(kept, column), gradients, tf.zeros_like(gradients))
    return tf.tensordot(tf.cast(factors, gradients.dtype), gradients, axes=1)
