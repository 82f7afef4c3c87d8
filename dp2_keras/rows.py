"""Rows of a structure of arrays, whatever kind of arrays they are.

    take(r) = (x[r], y[r], sample_weight[r])

for NumPy arrays, tensors, scipy sparse matrices, sparse tensors, and anything else with `len`
and `[rows]`. What is taken is dense, and floats are of Keras's float type, as in `fit`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from dp2_keras import _keras


class Rows:
    """The examples of (x, y, sample_weight), by row.

    Use `Rows.of(data)`.
    """

    def __init__(self, structure: Any, columns: list):
        self._structure = structure
        self._columns = columns

    @classmethod
    def of(cls, data: Any) -> Rows:
        """Makes rows of a tuple (x, y, sample_weight), in which the last may be None.

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
        return cls(data, columns)

    def __len__(self):
        return _length(self._columns[0])

    def take(self, rows: Any) -> Any:
        """The rows (an array of integers, or a slice), dense, in the structure of the data."""
        return tf.nest.pack_sequence_as(self._structure, [_dense(c[rows]) for c in self._columns])

    def split(self, count: int) -> tuple[Rows, Any]:
        """The first `count` rows, and the data after them."""
        head = Rows(self._structure, [_Head(c, count) for c in self._columns])
        return head, self.take(slice(count, None))

    def signature(self) -> Any:
        """The `tf.TensorSpec`s of any number of rows."""
        none = self.take(np.zeros([0], np.int64))
        return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), none)


class _Head:
    """The first rows of a column, without a copy."""

    def __init__(self, column, count):
        self._column, self._count = column, count
        self.shape = (count,)

    def __getitem__(self, rows):
        if isinstance(rows, slice):
            rows = np.arange(self._count)[rows]
        return self._column[rows]


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
        return leaf.tocsr()
    if hasattr(leaf, "iloc") or tf.is_tensor(leaf) or not hasattr(leaf, "__getitem__"):
        return np.asarray(leaf)
    return leaf


def _length(column):
    return int(column.shape[0]) if hasattr(column, "shape") else len(column)


def _dense(rows):
    rows = rows.toarray() if hasattr(rows, "toarray") else np.asarray(rows)
    if np.issubdtype(rows.dtype, np.floating):
        return rows.astype(_keras.keras.backend.floatx(), copy=False)
    return rows
