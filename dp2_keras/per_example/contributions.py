"""What one variable gets from each example, without making it where that can be avoided.

For example i with what a layer was given (operands) and the gradient d_i of the
example's loss at the layer's output, the variable's gradient is

    g_i = gradients(operands_i, d_i)

A `Contribution` answers two questions about the g_i of a batch, under a scale S:

    squared_norms(S)[i]   = ||S * g_i||^2
    weighted_sum(f, kept) = sum over kept i of f_i g_i

The scale stands inside the norm, where it is part of the sensitivity: with inputs a
and output gradients d of a dense layer,

    ||S * (a d^T)||^2 = (a^2)^T S^2 d^2,       and ||a||^2 ||d||^2 where S = 1

Examples that are not kept are left out by selection before they meet a number. By
default a gradient is made, block by block; a subclass says where it need not be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from dp2_keras import privatizer
from dp2_keras.per_example.blocks import map_blocks, sum_blocks


class Contribution:
    """The gradients of one variable, each a function of its example's operands.

    Args:
        operands: tensors whose leading axis is the example; those of gradients come last.
        shape: the variable's.
    """

    def __init__(self, operands: Sequence[tf.Tensor], shape: Sequence[int]):
        self.operands, self.shape = list(operands), tuple(shape)

    def gradients(self, *operands: tf.Tensor) -> tf.Tensor:
        """Makes the gradients [m, *shape] of a block of examples."""
        raise NotImplementedError

    def squared_norms(self, scale: tf.Tensor | None) -> tf.Tensor:
        """float64 [n], the squared norms of the gradients times the scale; None is 1."""

        def norms(*operands):
            return privatizer.squared_norms(privatizer.scale_by(self.gradients(*operands), scale))

        return map_blocks(norms, self.operands, self.elements())

    def weighted_sum(self, factors: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
        """The sum of the kept examples' gradients, each times its factor."""

        def total(factors, kept, *operands):
            return privatizer.weighted_sum(factors, self.gradients(*operands), kept)

        operands = [factors, kept, *self.operands]
        zero = tf.zeros(self.shape, self.operands[-1].dtype)
        return sum_blocks(total, operands, self.elements(), zero)

    def elements(self) -> int:
        """How many numbers it takes to make one example's gradient."""
        return math.prod(self.shape)


class Direct(Contribution):
    """g_i as it is: for variables no larger than what the layer puts out, such as a bias."""

    def __init__(self, gradients: tf.Tensor):
        super().__init__([gradients], gradients.shape[1:])

    def gradients(self, gradients):
        return gradients

    def squared_norms(self, scale):
        return privatizer.squared_norms(privatizer.scale_by(self.operands[0], scale))

    def weighted_sum(self, factors, kept):
        return privatizer.weighted_sum(factors, self.operands[0], kept)


class Bilinear(Contribution):
    """Gradients linear in d, so that the factors go into d and one sum is made of all examples."""

    def total(self, *operands: tf.Tensor) -> tf.Tensor:
        """The sum of all examples' gradients."""
        raise NotImplementedError

    def weighted_sum(self, factors, kept):
        *operands, d = (privatizer.select(t, kept) for t in self.operands)
        d *= tf.cast(privatizer.as_column(factors, d.shape.rank), d.dtype)
        return self.total(*operands, d)


class Outer(Bilinear):
    """g = sum_t a_t d_t^T, a matrix [in, out], with a time axis or without one.

    Without: the equation at the top of this file. With time, and S = 1, also

        ||g||^2 = sum_{t, u} (a_t . a_u) (d_t . d_u)

    in float64, because the terms cancel; where that is dearer than g, or S is not 1, g
    itself is made.

    Args:
        a: [n, in] or [n, time, in].
        d: [n, out] or [n, time, out].
        shape: the variable's; its entries in the order of the matrix's.
    """

    def __init__(self, a: tf.Tensor, d: tf.Tensor, shape: Sequence[int]):
        if a.shape.rank == 3 and a.shape[1] == 1:
            a, d = a[:, 0], d[:, 0]
        super().__init__([a, d], shape)

    def gradients(self, a, d):
        if a.shape.rank == 2:
            a, d = a[:, None], d[:, None]
        return tf.reshape(tf.matmul(a, d, transpose_a=True), [-1, *self.shape])

    def total(self, a, d):
        a, d = (tf.reshape(t, [-1, t.shape[-1]]) for t in (a, d))
        return tf.reshape(tf.matmul(a, d, transpose_a=True), self.shape)

    def squared_norms(self, scale):
        a, d = self.operands
        if a.shape.rank == 2:
            return _product_norms(a, d) if scale is None else _scaled_product_norms(a, d, scale)
        time, size_in, size_out = a.shape[1], a.shape[2], d.shape[2]
        if scale is None and time is not None and 2 * time * (size_in + size_out) < size_in * size_out:
            return _pairwise_norms(a, d)
        return super().squared_norms(scale)


class Rows(Bilinear):
    """The rows of a table that an example names; one named twice gets the sum of both.

        g[r] = sum over t with ids_t = r of d_t

    Args:
        ids: integers [n, time], at least 0 and below the number of rows.
        d: [n, time, width].
        shape: [rows, width].
    """

    def __init__(self, ids: tf.Tensor, d: tf.Tensor, shape: Sequence[int]):
        super().__init__([ids, d], shape)

    def gradients(self, ids, d):
        examples, rows = tf.shape(ids)[0], self.shape[0]
        ids += rows * tf.range(examples)[:, None]
        return tf.reshape(_segment_sums(d, ids, examples * rows), [-1, *self.shape])

    def total(self, ids, d):
        return _segment_sums(d, ids, self.shape[0])

    def squared_norms(self, scale):
        ids, d = self.operands
        if ids.shape[1] != 1:
            ids, d = _sum_repeated(ids, d)
        if scale is not None:
            d *= tf.cast(tf.gather(scale, ids), d.dtype)
        return privatizer.squared_norms(d)


class Total(Contribution):
    """A variable used several times: the norm of the sum, never the sum of norms."""

    def __init__(self, parts: Sequence[Contribution]):
        self.parts = parts
        super().__init__([t for part in parts for t in part.operands], parts[0].shape)

    def gradients(self, *operands):
        operands = iter(operands)
        return tf.add_n([part.gradients(*(next(operands) for _ in part.operands)) for part in self.parts])

    def weighted_sum(self, factors, kept):
        return tf.add_n([part.weighted_sum(factors, kept) for part in self.parts])

    def elements(self):
        return math.prod(self.shape) * len(self.parts)


class Made(Contribution):
    """Gradients from any function of one block; what a layer without a formula gets.

    Args:
        make: maps operands [m, ...] to gradients [m, *shape].
        operands: tensors whose leading axis is the example.
        shape: the variable's.
    """

    def __init__(self, make: Callable, operands: Sequence[tf.Tensor], shape: Sequence[int]):
        super().__init__(operands, shape)
        self.gradients = make


# A square below it is 0 in float32; added to sums of squares, no norm is smaller than it should be.
_TINY = 2.0**-126


def _product_norms(a, d):
    """||a||^2 ||d||^2, with room for the squares that vanish."""
    d, largest = _to_unit_size(d)
    squares = [privatizer.squared_norms(t) + t.shape[-1] * _TINY for t in (a, d)]
    return squares[0] * squares[1] * tf.square(largest)


def _scaled_product_norms(a, d, scale):
    """(a^2)^T S^2 d^2, with room for the squares that vanish."""
    scale = tf.cast(tf.reshape(scale, [a.shape[-1], d.shape[-1]]), a.dtype)
    squares = tf.maximum(tf.square(scale), _TINY)
    room = tf.matmul(tf.fill([1, a.shape[-1]], tf.cast(_TINY, a.dtype)), squares)
    d, largest = _to_unit_size(d)
    squared = tf.reduce_sum((tf.matmul(tf.square(a), squares) + room) * tf.square(d), axis=-1)
    return tf.cast(squared, tf.float64) * tf.square(largest)


def _to_unit_size(rows):
    """Rows divided by their largest entries, and those entries."""
    largest = tf.reduce_max(tf.abs(rows), axis=-1, keepdims=True)
    largest = tf.where(largest > 0, largest, tf.ones_like(largest))
    return rows / largest, tf.cast(largest[:, 0], tf.float64)


def _pairwise_norms(a, d):
    products = [tf.matmul(t, t, transpose_b=True) for t in (tf.cast(a, tf.float64), tf.cast(d, tf.float64))]
    squared = tf.reduce_sum(products[0] * products[1], axis=[1, 2])
    return tf.where(squared < 0, tf.zeros_like(squared), squared)


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
