"""The workloads as Keras models, for every contender that trains one."""

from __future__ import annotations

import keras
import workloads
from keras import layers


def build(workload: workloads.Workload):
    """The model of a workload (functional), and its loss."""
    inputs, outputs, loss = _MODELS[workload.model](workload)
    return keras.Model(inputs, outputs), loss


def _linear(workload):
    inputs = keras.Input((workloads.WORDS,))
    outputs = layers.Dense(workload.size)(inputs)
    if workload.size == 1:
        return inputs, outputs, keras.losses.BinaryCrossentropy(from_logits=True)
    return inputs, outputs, keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _factors(workload):
    user, item = (keras.Input((1,), dtype="int32") for _ in range(2))
    sizes = (workloads.USERS, workloads.ITEMS)
    factors = [
        layers.Flatten()(layers.Embedding(n, workloads.FACTORS)(ids)) for n, ids in zip(sizes, (user, item))
    ]
    return [user, item], layers.Dot(1)(factors), keras.losses.MeanSquaredError()


def _cnn(workload):
    inputs = keras.Input((28, 28, 1))
    x = layers.Conv2D(16, 8, strides=2, padding="same", activation="relu")(inputs)
    x = layers.MaxPooling2D(2, 1)(x)
    x = layers.Conv2D(32, 4, strides=2, padding="valid", activation="relu")(x)
    x = layers.MaxPooling2D(2, 1)(x)
    x = layers.Dense(32, activation="relu")(layers.Flatten()(x))
    return inputs, layers.Dense(10)(x), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _transformer(workload):
    inputs = keras.Input((workload.size,), dtype="int32")
    x = layers.Embedding(workloads.TOKENS, 64)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
    hidden = layers.Dense(64)(layers.Dense(256, activation="relu")(x))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x + hidden))
    return inputs, layers.Dense(1)(x), keras.losses.BinaryCrossentropy(from_logits=True)


def _dense(workload):
    inputs = keras.Input((workload.size,))
    return inputs, layers.Dense(workload.size)(inputs), keras.losses.MeanSquaredError()


_MODELS = {"linear": _linear, "factors": _factors, "cnn": _cnn, "transformer": _transformer, "dense": _dense}
