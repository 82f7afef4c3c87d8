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
import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from dp2_keras import _checks, xla
from dp2_keras.noise import NoiseSource
from dp2_keras.secure_noise import grid_deviation, grid_sums


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
        scales: makes the tensors that multiply the gradients before the clip, one per
            variable; None for 1 everywhere.
        l2_norm_clip: scalar tensor or float, C.
        is_scaled: whether this step scales at all: a scalar tensor, or True. An SGD step
            of DP² does not, and its cheaper formulas need no tensor of ones.
        is_squared: whether it is the squares of the scaled gradients, element by element, that are
            clipped and summed in their place: a scalar tensor, or False. The sensitivity is C all the same.
    """

    variables: Sequence
    scales: Callable[[], Sequence[tf.Tensor]] | None
    l2_norm_clip: tf.Tensor | float
    is_scaled: tf.Tensor | bool = True
    is_squared: tf.Tensor | bool = False

    @property
    def sensitivity(self) -> tf.Tensor | float:
        """The most by which adding or removing an example changes the answer, in L2 norm: C."""
        return self.l2_norm_clip

    def zeros(self) -> list[tf.Tensor]:
        """The sum over no examples."""
        return [tf.zeros(v.shape, compute_dtype(v.dtype)) for v in self.variables]

    def by_scale(self, answer: Callable):
        """Gives `answer(scales)` in a step that scales, and `answer(None)` in one that does not.

        Only one of the two is run; both return tensors of the same shapes and dtypes.
        """
        if self.scales is None:
            return answer(None)
        if self.is_scaled is True:
            return answer(self.scales())
        return tf.cond(self.is_scaled, lambda: answer(self.scales()), lambda: answer(None))

    def by_square(self, answer: Callable):
        """Gives `answer(True)` in a step that squares, and `answer(False)` in one that does not.

        Only one of the two is run, as in `by_scale`.
        """
        if isinstance(self.is_squared, bool):
            return answer(self.is_squared)
        return tf.cond(self.is_squared, lambda: answer(True), lambda: answer(False))

    def each(self, answer: Callable):
        """Gives `answer(query)` of each query that this one is made of: itself."""
        return answer(self)

    def clip(self, per_example_gradients: Sequence[tf.Tensor], mask: tf.Tensor):
        """Scales, clips and sums gradients whose leading axis is the example.

        Args:
            per_example_gradients: one tensor per variable, of shape [n, *variable].
            mask: bool [n]; False is padding.

        Returns:
            The summed tensors, and the norms [n] of the scaled gradients, 0 where the
            example was left out.
        """

        def answer(scales, squared):
            scaled = [scale_by(g, s) for g, s in zip(gradients, scales or [None] * len(gradients))]
            scaled = list(map(tf.square, scaled)) if squared else scaled
            factors, kept, norms = self.factors(tf.add_n([squared_norms(g) for g in scaled]), mask)
            sums = [self.total(factors, g, kept) for g in scaled]
            for value, variable in zip(sums, self.variables):
                value.set_shape(variable.shape)  # A map over an unknown number of examples forgets it.
            return sums, norms

        gradients = [tf.cast(g, compute_dtype(g.dtype)) for g in per_example_gradients]
        return self.by_square(lambda squared: self.by_scale(lambda scales: answer(scales, squared)))

    def total(self, factors: tf.Tensor, gradients: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
        """One variable's part of the answer, of gradients [n, *variable] and their clip factors [n]."""
        return weighted_sum(factors, gradients, kept)

    def total_unmade(self, factors: tf.Tensor, contribution, kept: tf.Tensor) -> tf.Tensor:
        """The same of gradients that need not be made: of a `per_example.contributions.Contribution`."""
        return contribution.weighted_sum(factors, kept)

    def factors(self, squared: tf.Tensor, mask: tf.Tensor):
        """Which examples count, and by how much.

        Args:
            squared: float64 [n], squared norms of the scaled gradients.
            mask: bool [n]; False is padding.

        Returns:
            The clip factors [n]; which examples are kept, bool [n]; and the norms [n],
            0 where one is left out.
        """
        norms = tf.cast(tf.sqrt(squared), tf.float32)
        kept = tf.math.is_finite(norms) & mask
        norms = tf.where(kept, norms, tf.zeros_like(norms))
        return self.clip_factors(norms), kept, norms

    def clip_factors(self, norms: tf.Tensor) -> tf.Tensor:
        """min(1, C / norm), without dividing by zero or infinity by infinity."""
        clip = tf.cast(self.l2_norm_clip, norms.dtype)
        return tf.where(norms > clip, clip / tf.maximum(norms, clip), tf.ones_like(norms))


@dataclasses.dataclass(frozen=True, eq=False)
class SquaresQuery(ClippingQuery):
    """The sum of the squares of clipped gradients, element by element.

        sum_i (c_i g_i)^2,   sensitivity C^2, because ||a^2||_2 <= ||a||_2^2

    It has no scale, before which the square of a gradient that is clipped after it may not be finite.

    Raises:
        ValueError: if there are `scales`.

    Example:
    >>> query = SquaresQuery([tf.zeros([2])], None, l2_norm_clip=5.0)
    >>> (total,), _ = query.clip([tf.constant([[6.0, 8.0], [1.0, 0.0]])], tf.constant([True, True]))
    >>> total.numpy().tolist(), query.sensitivity  # Of (3, 4), clipped, and of (1, 0).
    ([10.0, 16.0], 25.0)
    """

    def __post_init__(self):
        if self.scales is not None:
            _checks.fail("None in a query of squares", scales=self.scales)

    @property
    def sensitivity(self) -> tf.Tensor | float:
        """C^2."""
        return self.l2_norm_clip * self.l2_norm_clip

    def total(self, factors, gradients, kept):
        return sum_of_squares(factors, gradients, kept)

    def total_unmade(self, factors, contribution, kept):
        return contribution.sum_of_squares(factors, kept)


@dataclasses.dataclass(frozen=True, eq=False)
class JointQuery:
    """Several queries of one batch, answered from the same gradients.

    Each is a release, and each has its noise: the step costs what all of them cost together.

    Attributes:
        queries: of the same variables; the last one is the step's own.
    """

    queries: Sequence[ClippingQuery]

    @property
    def variables(self) -> Sequence:
        """The trainable variables."""
        return self.queries[-1].variables

    @property
    def l2_norm_clip(self) -> tf.Tensor | float:
        """C of the step's own query."""
        return self.queries[-1].l2_norm_clip

    def zeros(self) -> list[tf.Tensor]:
        """The sums over no examples, one query's after another's."""
        return [zero for query in self.queries for zero in query.zeros()]

    def each(self, answer: Callable):
        """Gives the values of `answer(query)` for all queries, and the norms for the last."""
        values, norms = zip(*(answer(query) for query in self.queries))
        return [value for some in values for value in some], norms[-1]


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedSum:
    """The answer to a `ClippingQuery`, and the only thing a private step accepts.

    Attributes:
        query: the query it answers, which knows its sensitivity.
        values: one summed tensor per variable, not yet noised; of a joint query, one query's after another's.
    """

    query: ClippingQuery | JointQuery
    values: Sequence[tf.Tensor]

    def plus(self, others: Sequence[ClippedSum]) -> ClippedSum:
        """The sum over more examples, of which others hold answers to the same query.

        Raises:
            ValueError: if one of them answers another query.
        """
        if not others:
            return self
        if any(other.query is not self.query for other in others):
            raise ValueError("Only answers to one and the same query can be added up.")
        values = [tf.add_n(parts) for parts in zip(self.values, *(other.values for other in others))]
        return ClippedSum(self.query, values)

    def parts(self) -> list[ClippedSum]:
        """The sums of each query that the query is made of."""
        if isinstance(self.query, ClippingQuery):
            return [self]
        values, size = list(self.values), len(self.query.variables)
        return [ClippedSum(q, values[k * size :][:size]) for k, q in enumerate(self.query.queries)]


def add_noise(
    clipped: ClippedSum,
    noise_multiplier: float,
    source: NoiseSource,
    draw: tf.Tensor,
    stream: int,
    indices: Sequence[int],
) -> list[tf.Tensor]:
    """Adds N(0, (sigma C)^2 I) to a clipped sum, C its sensitivity.

    Args:
        clipped: the sum.
        noise_multiplier: sigma.
        source, draw, stream: where the noise comes from; see `noise.py`.
        indices: a number per variable that is the same in every step.
    """
    values, stddev = clipped.values, noise_multiplier * clipped.query.sensitivity
    noise_of = functools.partial(source.normal, draw=draw, stream=stream)
    shapes = [value.shape for value in values]
    if source.is_on_grid:
        deviation = grid_deviation(noise_multiplier, sum(map(math.prod, shapes)))
        noisy = grid_sums(values, _noise_for(shapes, indices, noise_of, deviation), stddev)
    else:
        noise = _noise_for(shapes, indices, noise_of, stddev)
        # In float32, which the noise is made in: of a longer sum, the last bits would stay as they were.
        noisy = [tf.cast(value, tf.float32) + z for value, z in zip(values, noise)]
    return [tf.cast(total, value.dtype) for total, value in zip(noisy, values)]


_SMALL = 1 << 15


def _noise_for(shapes, indices, noise_of, stddev):
    """Normals of several shapes; all small ones at once, which takes no longer than one of them."""
    small = [k for k, shape in enumerate(shapes) if math.prod(shape) <= _SMALL]
    drawn = {
        k: noise_of(shapes[k], variable=indices[k], stddev=stddev)
        for k in range(len(shapes))
        if k not in small
    }
    if small:
        sizes = [math.prod(shapes[k]) for k in small]
        parts = tf.split(noise_of([sum(sizes)], variable=indices[small[0]], stddev=stddev), sizes)
        drawn.update({k: tf.reshape(part, shapes[k]) for k, part in zip(small, parts)})
    return [drawn[k] for k in range(len(shapes))]


def compute_dtype(dtype) -> tf.DType:
    """What gradients of that dtype are clipped and noised in: at least float32."""
    dtype = tf.as_dtype(dtype)
    return dtype if dtype.size >= 4 else tf.float32


def scale_by(tensor: tf.Tensor, scale: tf.Tensor | None) -> tf.Tensor:
    """The tensor times the scale; None is 1."""
    return tensor if scale is None else tensor * tf.cast(scale, tensor.dtype)


def squared_norms(gradients: tf.Tensor) -> tf.Tensor:
    """Sums of squares per example, float64."""
    if gradients.shape.rank < 2:
        return tf.square(tf.cast(gradients, tf.float64))
    if not xla.is_compiling():  # The one operation that squares and adds without a copy of its argument.
        return tf.square(tf.cast(tf.math.reduce_euclidean_norm(_flat(gradients), axis=-1), tf.float64))
    rows = tf.cast(tf.reduce_sum(tf.square(gradients), axis=-1), tf.float64)  # XLA's float32 loses digits.
    return tf.reduce_sum(rows, axis=list(range(1, rows.shape.rank)))


def weighted_sum(factors: tf.Tensor, gradients: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    """sum_i factors_i gradients_i over the kept examples; 0 * NaN never happens."""
    total = tf.matmul(tf.cast(factors, gradients.dtype)[None], _flat(select(gradients, kept)))
    shape = gradients.shape[1:]
    return tf.reshape(total, shape if shape.is_fully_defined() else tf.shape(gradients)[1:])


def sum_of_squares(factors: tf.Tensor, gradients: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    """sum_i (factors_i gradients_i)^2 over the kept examples, element by element.

    Clipped before they are squared: the square of a long gradient may not be finite.
    """
    return tf.reduce_sum(tf.square(weighted(factors, gradients, kept)), axis=0)


def weighted(factors: tf.Tensor, rows: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    """Rows times their factors, by selection: zeros for examples that are not kept."""
    return select(rows, kept) * tf.cast(as_column(factors, rows.shape.rank), rows.dtype)


def _flat(gradients):
    """Gradients [n, *shape] as [n, width]."""
    width = gradients.shape[1:].num_elements()
    if width:
        return tf.reshape(gradients, [-1, width])
    return tf.reshape(gradients, [tf.shape(gradients)[0], tf.reduce_prod(tf.shape(gradients)[1:])])


def select(tensor: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    """The rows that are kept; zeros in place of the others.

    The tensor itself where all are kept: the same numbers, without the copy that would be the
    dearest part of a step whose examples are all good.
    """

    def selected():
        return tf.where(as_column(kept, tensor.shape.rank), tensor, tf.zeros_like(tensor))

    if xla.is_compiling():
        return selected()
    return tf.cond(tf.reduce_all(kept), lambda: tensor, selected)


def as_column(vector: tf.Tensor, rank: int) -> tf.Tensor:
    """A number per example, shaped to multiply tensors of that rank."""
    return tf.reshape(vector, [-1] + [1] * (rank - 1))
