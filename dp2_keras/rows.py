"""Rows of a structure of arrays, whatever kind of arrays they are.

    batch(r) = (x[r], y[r], sample_weight[r])

for NumPy arrays, tensors, scipy sparse matrices, sparse tensors, and anything else with `len`
and `[rows]`. Floats are of Keras's float type, as in `fit`. Arrays in memory are gathered by TensorFlow,
which takes half the time of NumPy; what is not in memory is asked for its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dp2_keras import _keras


class Rows:
    """The examples of (x, y, sample_weight), by row.

    Use `Rows.of(data)`.
    """

    def __init__(self, structure: Any, columns: list, count: int, keeps_sparse: bool):
        self._structure, self._columns = structure, columns
        self._count, self._keeps_sparse = count, keeps_sparse

    @classmethod
    def of(cls, data: Any, *, keeps_sparse: bool = False) -> Rows:
        """Makes rows of a tuple (x, y, sample_weight), in which the last may be None.

        Args:
            data: the tuple.
            keeps_sparse: whether batches of sparse rows are sparse tensors, not dense ones.

        Raises:
            ValueError: if the arrays differ in length, or there are none.
        """
        data = _lists_to_tuples(tuple(data))
        while data and data[-1] is None:
            data = data[:-1]
        columns = [_column(leaf) for leaf in tf.nest.flatten(data)]
        if any(column is None for column in columns):
            raise ValueError(
                "Each of x, y and sample_weight must be given in full or left out, and y with sample_weight. "
                "Received: None in the place of an array"
            )
        lengths = [_length(column) for column in columns]
        if len(set(lengths)) != 1:
            raise ValueError(
                "Inputs, labels and sample weights must have one row per example. Received: arrays "
                f"with {lengths} rows"
            )
        return cls(data, columns, lengths[0], keeps_sparse)

    def __len__(self):
        return self._count

    def batches(self, numbers: tf.data.Dataset) -> tf.data.Dataset:
        """The rows of each element, an int64 tensor of their numbers, in the structure of the data."""
        return numbers.map(self.taker())

    def taker(self) -> Callable:
        """A function of row numbers, an int64 tensor, that gives those rows in the structure of the data."""
        gathers = [_gather(column, self._keeps_sparse) for column in self._columns]
        return lambda rows: tf.nest.pack_sequence_as(self._structure, [gather(rows) for gather in gathers])

    def split(self, count: int) -> tuple[Rows, Any]:
        """The first `count` rows, and the data after them."""
        head = Rows(self._structure, self._columns, count, self._keeps_sparse)
        rest = [c[count:] for c in self._columns]
        rest = [t if self._keeps_sparse and hasattr(t, "tocoo") else _dense(t) for t in rest]
        return head, tf.nest.pack_sequence_as(self._structure, rest)


def _gather(column, keeps_sparse):
    """A function of a tensor of row numbers that gives those rows of a column, in a graph."""
    if type(column) is np.ndarray:
        held = tf.constant(_dense(column))
        return lambda rows: tf.gather(held, rows)
    if keeps_sparse and hasattr(column, "tocoo"):
        return lambda rows: _sparse_rows(column, rows)
    like = _dense(column[np.zeros([0], np.int64)])

    def ask(rows):
        asked = tf.numpy_function(lambda rows: _dense(column[rows]), [rows], like.dtype)
        return tf.ensure_shape(asked, [None, *like.shape[1:]])

    return ask


def _sparse_rows(matrix, rows):
    def entries(rows):
        taken = matrix[rows].tocoo()
        return np.stack([taken.row, taken.col], axis=1).astype(np.int64), _in_float_type(taken.data)

    dtype = _in_float_type(matrix.data[:0]).dtype
    positions, values = tf.numpy_function(entries, [rows], (tf.int64, dtype))
    shape = tf.stack([tf.size(rows, tf.int64), matrix.shape[1]])
    positions, values = tf.ensure_shape(positions, [None, 2]), tf.ensure_shape(values, [None])
    return tf.SparseTensor(positions, values, shape)


def is_arrays(data: Any) -> bool:
    """Whether every leaf of a structure has rows that can be asked for by number."""
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    return bool(leaves) and all(_is_array(leaf) for leaf in leaves)


def _is_array(leaf):
    shape = getattr(leaf, "shape", None)
    return shape is not None and len(shape) > 0 and not isinstance(leaf, tf.RaggedTensor)


def _lists_to_tuples(data):
    """As Keras does: `tf.data` would take a list for a tensor."""
    if isinstance(data, (list, tuple)):
        return tuple(_lists_to_tuples(part) for part in data)
    if isinstance(data, dict):
        return {name: _lists_to_tuples(part) for name, part in data.items()}
    return data


def _column(leaf):
    """What answers `[rows]`; a sparse tensor as scipy's, of which rows can be taken."""
    if leaf is None:
        return None
    if isinstance(leaf, tf.SparseTensor):
        import scipy.sparse

        positions = leaf.indices.numpy()
        matrix = scipy.sparse.coo_matrix((leaf.values.numpy(), positions.T), tuple(leaf.shape))
        return matrix.tocsr()
    if hasattr(leaf, "tocsr"):
        return leaf.tocsr().sorted_indices()  # A copy: the matrix is the user's.
    if hasattr(leaf, "iloc") or tf.is_tensor(leaf) or not hasattr(leaf, "__getitem__"):
        return np.asarray(leaf)
    return leaf


def _length(column):
    return int(column.shape[0]) if hasattr(column, "shape") else len(column)


def _dense(rows):
    return _in_float_type(rows.toarray() if hasattr(rows, "toarray") else np.asarray(rows))


def _in_float_type(rows):
    if np.issubdtype(rows.dtype, np.floating):
        return rows.astype(_keras.keras.backend.floatx(), copy=False)
    return rows
