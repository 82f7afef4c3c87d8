"""Sparse inputs of a dense layer, without ever making the dense row.

    g = a d^T,   ||S * g||^2 = sum over a_j != 0 of a_j^2 (S_j^2 . d^2)

The sum over entries is a product of sparse a^2 and S^2: memory of the entries of a, of d and of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dp2_keras import privatizer
from dp2_keras.per_example.contributions import (
    Contribution,
    nonzero,
    product_norms,
    scaled_product_norms,
)


class SparseOuter(Contribution):
    """The gradients a_i d_i^T of a kernel.

    Args:
        a: `tf.SparseTensor` [n, in]; entries given twice count as their sum.
        d: [n, out].
        shape: [in, out].
    """

    is_made = False

    def __init__(self, a: tf.SparseTensor, d: tf.Tensor, shape: Sequence[int]):
        super().__init__([d], shape)
        self.rows = _distinct(a)

    def gradients(self, d):
        raise ValueError(
            "A Dense layer of sparse rows must be used once: a second use would have to make the dense rows. "
            "Convert them with `tf.sparse.to_dense`."
        )

    def squared_norms(self, scale):
        d, rows = self.operands[0], self.rows
        if scale is None:
            squares = tf.square(tf.cast(rows.values, tf.float64))
            of_rows = tf.math.unsorted_segment_sum(squares, rows.indices[:, 0], tf.shape(d)[0])
            return product_norms(of_rows, self.shape[0], d)
        squared = rows.with_values(tf.square(rows.values))
        return scaled_product_norms(lambda squares: tf.sparse.sparse_dense_matmul(squared, squares), d, scale)

    def squared(self):
        squares = self.rows.with_values(tf.square(self.rows.values))
        return SparseOuter(squares, tf.square(self.operands[0]), self.shape)

    def weighted_sum(self, factors, kept):
        return self._product(self._kept(kept), privatizer.weighted(factors, self.operands[0], kept))

    def sum_of_squares(self, factors, kept):
        d, entries, rows = self.operands[0], self._kept(kept), self.rows.indices[:, 0]
        largest = tf.maximum(tf.math.unsorted_segment_max(tf.abs(entries), rows, tf.shape(d)[0]), 0.0)
        entries /= tf.gather(nonzero(largest), rows)  # As in `Outer`.
        d = largest[:, None] * privatizer.weighted(factors, d, kept)
        return self._product(tf.square(entries), tf.square(d))

    def each(self):
        rows = tf.reshape(tf.sparse.to_dense(self.rows, validate_indices=False), [-1, self.shape[0]])
        return rows[:, :, None] * self.operands[0][:, None]

    def _kept(self, kept):
        """The entries, by selection."""
        return privatizer.select(self.rows.values, tf.gather(kept, self.rows.indices[:, 0]))

    def _product(self, entries, d):
        return tf.sparse.sparse_dense_matmul(self.rows.with_values(entries), d, adjoint_a=True)


def _distinct(a):
    """The same rows, entries at one place added up.

    Entries in order, as batches of SciPy's rows have them, are told apart at a glance.
    """
    place = a.indices[:, 0] * a.dense_shape[1] + a.indices[:, 1]

    def added_up():
        distinct, number = tf.unique(place)
        entries = tf.math.unsorted_segment_sum(a.values, number, tf.size(distinct))
        return tf.stack([distinct // a.dense_shape[1], distinct % a.dense_shape[1]], axis=1), entries

    in_order = tf.reduce_all(place[1:] > place[:-1])
    indices, entries = tf.cond(in_order, lambda: (a.indices, a.values), added_up)
    return tf.SparseTensor(indices, entries, a.dense_shape)
