"""Sparse inputs of a dense layer, without ever making the dense row.

    g = a d^T,   ||S * g||^2 = sum over a_j != 0 of a_j^2 (S_j^2 . d^2)

A row of S and of d per entry of a: memory grows with the entries that are not zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dp2_keras import privatizer
from dp2_keras.per_example.contributions import Contribution


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
        self.rows, self.columns, self.entries = _distinct(a)

    def gradients(self, d):
        raise ValueError(
            "A Dense layer of sparse rows must be used once: a second use would have to make the dense rows. "
            "Convert them with `tf.sparse.to_dense`."
        )

    def squared_norms(self, scale):
        d = self.operands[0]
        at_entries = tf.gather(d, self.rows) * self.entries[:, None]
        if scale is not None:
            at_entries *= tf.cast(tf.gather(scale, self.columns), d.dtype)
        return tf.math.unsorted_segment_sum(privatizer.squared_norms(at_entries), self.rows, tf.shape(d)[0])

    def weighted_sum(self, factors, kept):
        d = privatizer.select(self.operands[0], kept)
        d *= tf.cast(privatizer.as_column(factors, 2), d.dtype)
        entries = privatizer.select(self.entries, tf.gather(kept, self.rows))
        indices = tf.stack([self.columns, self.rows], axis=1)
        transposed = tf.SparseTensor(indices, entries, [self.shape[0], tf.shape(d, tf.int64)[0]])
        return tf.sparse.sparse_dense_matmul(transposed, d)


def _distinct(a):
    """Rows, columns and values of the entries, those at one place added up.

    Entries in order, as batches of SciPy's rows have them, are told apart at a glance.
    """
    place = a.indices[:, 0] * a.dense_shape[1] + a.indices[:, 1]

    def added_up():
        distinct, number = tf.unique(place)
        entries = tf.math.unsorted_segment_sum(a.values, number, tf.size(distinct))
        return distinct // a.dense_shape[1], distinct % a.dense_shape[1], entries

    def as_they_are():
        return a.indices[:, 0], a.indices[:, 1], a.values

    return tf.cond(tf.reduce_all(place[1:] > place[:-1]), as_they_are, added_up)
