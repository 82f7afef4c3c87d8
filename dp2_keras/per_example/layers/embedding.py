"""Embedding: y_t = E[id_t].

g_E[r] = sum over t with id_t = r of d_t; a token that comes twice is summed before the norm

A token that is not in the table has no gradient, and XLA would read the nearest row for it: its example is
left out, as one whose gradient is not a number.
"""

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.contributions import Rows
from dp2_keras.per_example.layers.registry import LayerKind


def contributions(layer, inputs, d):
    """That of the table."""
    rows, width = layer.embeddings.shape
    ids = tf.reshape(tf.cast(inputs, tf.int64), [tf.shape(inputs)[0], _times(inputs)])
    ids = tf.where(ids < 0, ids + rows, ids)  # Keras 3 counts those from the end.
    is_known = (ids >= 0) & (ids < rows)
    d = tf.reshape(d, [tf.shape(d)[0], _times(inputs), width])
    d = tf.where(is_known[..., None], d, tf.constant(float("nan"), d.dtype))
    ids = tf.cast(tf.where(is_known, ids, tf.zeros_like(ids)), tf.int32)
    return {"embeddings": Rows(ids, d, (rows, width))}


def _times(inputs):
    count = inputs.shape[1:].num_elements()
    return -1 if count is None else count


def register(registry):
    """Adds `Embedding`."""
    registry.register(_keras.keras.layers.Embedding, LayerKind(("embeddings",), contributions))
