"""Embedding: y_t = E[id_t].

g_E[r] = sum over t with id_t = r of d_t; a token that comes twice is summed before the norm
"""

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.contributions import Rows
from dp2_keras.per_example.layers.registry import LayerKind


def contributions(layer, inputs, d):
    """That of the table."""
    rows, width = layer.embeddings.shape
    ids = tf.reshape(tf.cast(inputs, tf.int32), [tf.shape(inputs)[0], _times(inputs)])
    ids = tf.where(ids < 0, ids + rows, ids)  # Keras 3 counts those from the end.
    return {"embeddings": Rows(ids, tf.reshape(d, [tf.shape(d)[0], _times(inputs), width]), (rows, width))}


def _times(inputs):
    count = inputs.shape[1:].num_elements()
    return -1 if count is None else count


def register(registry):
    """Adds `Embedding`."""
    registry.register(_keras.keras.layers.Embedding, LayerKind(("embeddings",), contributions))
