"""What one variable gets from each example, without making it where that can be avoided.

For example i with what a layer was given (operands) and the gradient d_i of the
example's loss at the layer's output, the variable's gradient is

    g_i = gradients(operands_i, d_i)

A `Contribution` answers questions about the g_i of a batch, the first under a scale S:

    squared_norms(S)[i]     = ||S * g_i||^2
    weighted_sum(f, kept)   = sum over kept i of f_i g_i
    sum_of_squares(f, kept) = sum over kept i of (f_i g_i)^2, element by element: squares of what is clipped
    squared()               = the contribution with g_i^2 in place of g_i: squares that are to be clipped
    each()[i]               = g_i, for public examples

The scale stands inside the norm, where it is part of the sensitivity: with inputs a
and output gradients d of a dense layer,

    ||S * (a d^T)||^2 = (a^2)^T S^2 d^2,       and ||a||^2 ||d||^2 where S = 1

and g_i^2 is a^2 (d^2)^T, so that squares need no gradient to be made either.

Examples that are not kept are left out by selection before they meet a number. By
default a gradient is made, block by block; a subclass says where it need not be.

Norms and sums are of one and the same rounded g_i. Were the terms of an example added up by themselves for
its norm, but in among those of others for the sum, then terms that are huge and cancel would have a norm of
nothing, and yet round away what the others left there: more than the clip norm. So what is added up within
an example is added up before it meets another.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from dp2_keras import privatizer
from dp2_keras.per_example.blocks import map_blocks, sum_blocks


class Contribution(abc.ABC):
    """The gradients of one variable, each a function of its example's operands.

    Args:
        operands: tensors whose leading axis is the example; those of gradients come last.
        shape: the variable's.
    """

    def __init__(self, operands: Sequence[tf.Tensor], shape: Sequence[int]):
        self.operands, self.shape = list(operands), tuple(shape)

    is_made = True  # Whether the answers need the gradients.

    @abc.abstractmethod
    def gradients(self, *operands: tf.Tensor) -> tf.Tensor:
        """Makes the gradients [m, *shape] of a block of examples."""

    def held(self) -> Contribution:
        """The same, with all gradients in memory where they are needed."""
        return Direct(self.gradients(*self.operands)) if self.is_made else self

    def squared_norms(self, scale: tf.Tensor | None) -> tf.Tensor:
        """float64 [n], the squared norms of the gradients times the scale; None is 1."""

        def norms(*operands):
            return privatizer.squared_norms(privatizer.scale_by(self.gradients(*operands), scale))

        return map_blocks(norms, self.operands, self.elements())

    def weighted_sum(self, factors: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
        """The sum of the kept examples' gradients, each times its factor."""

        return self._sum(privatizer.weighted_sum, factors, kept)

    def sum_of_squares(self, factors: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
        """The sum of the squares, element by element, of the kept examples' gradients times their factors."""
        return self._sum(privatizer.sum_of_squares, factors, kept)

    def _sum(self, function, factors, kept):
        def total(factors, kept, *operands):
            return function(factors, self.gradients(*operands), kept)

        operands = [factors, kept, *self.operands]
        zero = tf.zeros(self.shape, self.operands[-1].dtype)
        return sum_blocks(total, operands, self.elements(), zero)

    def each(self) -> tf.Tensor:
        """All gradients, [n, *shape]: not clipped and not summed, so never of private examples."""
        return self.gradients(*self.operands)

    def squared(self) -> Contribution:
        """That of the squares of the gradients, element by element."""
        return Squared(self)

    def elements(self) -> int:
        """How many numbers it takes to make one example's gradient."""
        return math.prod(self.shape)

    def plus(self, others: Sequence[Contribution]) -> Contribution:
        """That of a variable which others contribute to as well."""
        return Total([self, *others])


class Direct(Contribution):
    """g_i as it is: for variables no larger than what the layer puts out, such as a bias."""

    is_made = False

    def __init__(self, gradients: tf.Tensor):
        super().__init__([gradients], gradients.shape[1:])

    def gradients(self, gradients):
        return gradients

    def squared(self):
        return Direct(tf.square(self.operands[0]))

    def squared_norms(self, scale):
        return privatizer.squared_norms(privatizer.scale_by(self.operands[0], scale))

    def _sum(self, function, factors, kept):
        return function(factors, self.operands[0], kept)


class Outer(Contribution):
    """g = sum_t a_t d_t^T, a matrix [in, out], with a time axis or without one.

    Without: the equation at the top of this file, and one product of matrices for the sum. With time, g is
    made for both.

    Args:
        a: [n, in] or [n, time, in].
        d: [n, out] or [n, time, out].
        shape: the variable's; its entries in the order of the matrix's.
    """

    def __init__(self, a: tf.Tensor, d: tf.Tensor, shape: Sequence[int]):
        if a.shape.rank == 3 and a.shape[1] == 1:
            a, d = a[:, 0], d[:, 0]
        super().__init__([a, d], shape)
        self.is_made = a.shape.rank == 3

    def gradients(self, a, d):
        if not self.is_made:
            a, d = a[:, None], d[:, None]
        return tf.reshape(tf.matmul(a, d, transpose_a=True), [-1, *self.shape])

    def squared_norms(self, scale):
        if self.is_made:
            return super().squared_norms(scale)
        a, d = self.operands
        if scale is None:
            return product_norms(privatizer.squared_norms(a), a.shape[-1], d)
        scale = tf.reshape(scale, [a.shape[-1], d.shape[-1]])
        return scaled_product_norms(lambda squares: tf.matmul(tf.square(a), squares), d, scale)

    def weighted_sum(self, factors, kept):
        if self.is_made:
            return super().weighted_sum(factors, kept)
        a, d = _weighted(self.operands, factors, kept)
        return tf.reshape(tf.matmul(a, d, transpose_a=True), self.shape)

    def sum_of_squares(self, factors, kept):
        if self.is_made:
            return super().sum_of_squares(factors, kept)
        a, d = _weighted(self.operands, factors, kept)
        largest = tf.reduce_max(tf.abs(a), axis=-1, keepdims=True)  # Of clipped gradients the squares are
        a, d = a / nonzero(largest), largest * d  # float32, but not those of a, nor of a small factor in d.
        return tf.reshape(tf.matmul(tf.square(a), tf.square(d), transpose_a=True), self.shape)

    def squared(self):
        return super().squared() if self.is_made else Outer(*map(tf.square, self.operands), self.shape)

    def plus(self, others):
        if not all(isinstance(other, Outer) for other in others):
            return super().plus(others)
        operands = zip(*(part.operands_over_time() for part in (self, *others)))
        return Outer(*(tf.concat(tensors, axis=1) for tensors in operands), self.shape)

    def operands_over_time(self):
        """a and d with a time axis, be it of one step."""
        return self.operands if self.is_made else [t[:, None] for t in self.operands]


class Rows(Contribution):
    """The rows of a table that an example names; one named twice gets the sum of both, first of all.

        g[r] = sum over t with ids_t = r of d_t

    Args:
        ids: integers [n, time], at least 0 and below the number of rows.
        d: [n, time, width].
        shape: [rows, width].
    """

    is_made = False

    def __init__(self, ids: tf.Tensor, d: tf.Tensor, shape: Sequence[int]):
        super().__init__([ids, d] if ids.shape[1] == 1 else _sum_repeated(ids, d), shape)

    def gradients(self, ids, d):
        examples, rows = tf.shape(ids)[0], self.shape[0]
        ids += rows * tf.range(examples)[:, None]
        return tf.reshape(_segment_sums(d, ids, examples * rows), [-1, *self.shape])

    def squared_norms(self, scale):
        ids, d = self.operands
        if scale is not None:
            d *= tf.cast(tf.gather(scale, ids), d.dtype)
        return privatizer.squared_norms(d)

    def weighted_sum(self, factors, kept):
        ids, d = _weighted(self.operands, factors, kept)
        return _segment_sums(d, ids, self.shape[0])

    def sum_of_squares(self, factors, kept):
        ids, d = _weighted(self.operands, factors, kept)  # No row twice.
        return _segment_sums(tf.square(d), ids, self.shape[0])

    def squared(self):
        ids, d = self.operands  # No row twice.
        return Rows(ids, tf.square(d), self.shape)

    def plus(self, others):
        if not all(isinstance(other, Rows) for other in others):
            return super().plus(others)
        operands = zip(*(part.operands for part in (self, *others)))
        return Rows(*(tf.concat(tensors, axis=1) for tensors in operands), self.shape)


class Total(Contribution):
    """A variable used several times: the norm of the sum, never the sum of norms."""

    def __init__(self, parts: Sequence[Contribution]):
        self.parts = parts
        super().__init__([t for part in parts for t in part.operands], parts[0].shape)

    def gradients(self, *operands):
        operands = iter(operands)
        return tf.add_n([part.gradients(*(next(operands) for _ in part.operands)) for part in self.parts])

    def elements(self):
        return sum(part.elements() for part in self.parts)


class Squared(Contribution):
    """The squares of gradients that have to be made."""

    def __init__(self, part: Contribution):
        self.part = part
        super().__init__(part.operands, part.shape)

    def gradients(self, *operands):
        return tf.square(self.part.gradients(*operands))

    def elements(self):
        return self.part.elements()


class Made(Contribution):
    """Gradients from any function of one block; what a layer without a formula gets.

    Args:
        make: maps operands [m, ...] to gradients [m, *shape].
        operands: tensors whose leading axis is the example.
        shape: the variable's.
    """

    def __init__(self, make: Callable, operands: Sequence[tf.Tensor], shape: Sequence[int]):
        super().__init__(operands, shape)
        self._make = make

    def gradients(self, *operands):
        return self._make(*operands)


# A square below it is 0 in float32; added to sums of squares, no norm is smaller than it should be.
_TINY = 2.0**-126


def product_norms(squared_norms: tf.Tensor, width: int, d: tf.Tensor) -> tf.Tensor:
    """||a||^2 ||d||^2, with room for the squares that vanish.

    Args:
        squared_norms: ||a||^2, float64 [n].
        width: how many entries a row of a has.
        d: [n, out].
    """
    d, largest = _to_unit_size(d)
    of_d = privatizer.squared_norms(d) + d.shape[-1] * _TINY
    return (squared_norms + width * _TINY) * of_d * tf.square(largest)


def scaled_product_norms(weigh: Callable, d: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """(a^2)^T S^2 d^2, with room for the squares that vanish.

    Args:
        weigh: maps S^2 to its product with a^2, [n, out].
        d: [n, out].
        scale: S, [in, out].
    """
    squares = tf.maximum(tf.square(tf.cast(scale, d.dtype)), _TINY)
    room = 2.0 * _TINY * tf.reduce_sum(tf.maximum(squares, 1.0), axis=0)  # For a^2, and for a^2 S^2.
    d, largest = _to_unit_size(d)
    squared = tf.reduce_sum((weigh(squares) + room) * (tf.square(d) + _TINY) + _TINY, axis=-1)
    lost = sum(scale.shape) * 2.0**-24  # At most: what is small beside a large term of a sum.
    return tf.cast(squared, tf.float64) * tf.square(largest) * (1.0 + lost)


def _to_unit_size(rows):
    """Rows divided by their largest entries, and those entries."""
    largest = nonzero(tf.reduce_max(tf.abs(rows), axis=-1, keepdims=True))
    return rows / largest, tf.cast(largest[:, 0], tf.float64)


def nonzero(sizes: tf.Tensor) -> tf.Tensor:
    """Numbers to divide by: 1 in place of 0."""
    return tf.where(sizes > 0, sizes, tf.ones_like(sizes))


def _weighted(operands, factors, kept):
    """Operands whose examples are weighted in the last one, by selection and a factor."""
    *others, d = operands
    return *(privatizer.select(t, kept) for t in others), privatizer.weighted(factors, d, kept)


def _segment_sums(d, ids, count):
    return tf.math.unsorted_segment_sum(tf.reshape(d, [-1, d.shape[-1]]), tf.reshape(ids, [-1]), count)


def _sum_repeated(ids, d):
    """Each example's distinct ids [n, time] and the sums of their d; zeros after the last."""
    order = tf.argsort(ids, axis=1, stable=True)
    ids, d = tf.gather(ids, order, batch_dims=1), tf.gather(d, order, batch_dims=1)
    is_new = tf.cast(ids[:, 1:] != ids[:, :-1], ids.dtype)
    place = tf.pad(tf.cumsum(is_new, axis=1), [[0, 0], [1, 0]])
    count = tf.size(ids)
    place += tf.reshape(tf.range(0, count, tf.shape(ids)[1]), [-1, 1])
    distinct = tf.math.unsorted_segment_max(tf.reshape(ids, [-1]), tf.reshape(place, [-1]), count)
    return tf.reshape(tf.maximum(distinct, 0), tf.shape(ids)), tf.reshape(
        _segment_sums(d, place, count), tf.shape(d)
    )
