"""Tiny models of every kind, and a slow loop that takes their gradients one example at a time."""

import dataclasses
from typing import Any, Callable

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers


@dataclasses.dataclass(frozen=True)
class Kind:
    """How to build a plain model, its data, and the loss of each output.

    Attributes:
        build: makes the plain Keras model.
        x, y: structures of arrays whose leading axis is the example.
        loss: what `compile` gets; one name per array of `y`.
        clips: norms for the SGD and the adaptive phase that some examples exceed and some do not.
    """

    build: Callable
    x: Any
    y: Any
    loss: Any = "mse"
    clips: tuple = (2.0, 12.0)


def normal(*shape, seed=0):
    """The same normal numbers for the same arguments."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def integers_below(high, *shape, low=0, seed=1):
    return np.random.default_rng(seed).integers(low, high, size=shape).astype(np.int32)


ROWS = 10


def dense():
    return keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(2)])


def conv():
    return keras.Sequential(
        [keras.Input((6, 6, 2)), layers.Conv2D(3, 3, strides=2, activation="relu"), layers.MaxPooling2D(),
         layers.Flatten(), layers.Dense(2)]
    )  # fmt: skip


def embedding():
    return keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(7, 3), layers.GlobalAveragePooling1D(),
         layers.Dense(2)]
    )  # fmt: skip


def transformer():
    tokens = keras.Input((3,), dtype="int32")
    x = layers.Embedding(7, 4)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(4)(layers.Dense(8, "gelu")(x)))
    return keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def lstm():
    return keras.Sequential([keras.Input((3, 2)), layers.LSTM(3), layers.Dense(2)])


def gru():
    return keras.Sequential([keras.Input((3, 2)), layers.GRU(3), layers.Dense(2)])


def bidirectional():
    return keras.Sequential([keras.Input((3, 2)), layers.Bidirectional(layers.LSTM(2)), layers.Dense(2)])


def two_inputs():
    a, b = keras.Input((3,)), keras.Input((2,))
    joined = layers.Concatenate()([layers.Dense(2, "tanh")(a), b])
    return keras.Model([a, b], layers.Dense(2)(joined))


def dict_inputs():
    a, b = keras.Input((3,), name="a"), keras.Input((3,), dtype="int32", name="b")
    joined = layers.Concatenate()([a, layers.Flatten()(layers.Embedding(7, 2)(b))])
    return keras.Model({"a": a, "b": b}, layers.Dense(2)(joined))


def two_outputs():
    x = keras.Input((5,))
    hidden = layers.Dense(3, "tanh")(x)
    return keras.Model(x, [layers.Dense(2, name="u")(hidden), layers.Dense(1, name="v")(hidden)])


def shared_layer():
    a, b = keras.Input((3,)), keras.Input((3,))
    encoder = layers.Dense(3, "tanh")
    return keras.Model([a, b], layers.Dense(2)(layers.Multiply()([encoder(a), encoder(b)])))


@keras.saving.register_keras_serializable("dp2_keras_tests")
class Subclassed(keras.Model):
    """A subclassed model that makes no layer until it is told."""

    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = layers.Dense(units, "tanh"), layers.Dense(2)

    def call(self, x):
        return self.out(self.hidden(x) + tf.reduce_sum(x, axis=-1, keepdims=True))


def masked():
    """Predicts from the last true token."""
    return keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(7, 2, mask_zero=True), layers.LSTM(3),
         layers.Dense(2)]
    )  # fmt: skip


def integers():
    return keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Rescaling(0.25), layers.Dense(3, "tanh"), layers.Dense(2)]
    )


TOKENS = integers_below(7, ROWS, 3)
PADDED = np.where(
    np.arange(3) < integers_below(4, ROWS, low=1)[:, None], integers_below(7, ROWS, 3, low=1), 0
)
Y = normal(ROWS, 2, seed=2)
A, B = normal(ROWS, 3, seed=3), normal(ROWS, 2, seed=4)

KINDS = {
    "dense": Kind(dense, normal(ROWS, 5), Y),
    "conv": Kind(conv, 0.15 * normal(ROWS, 6, 6, 2), Y, clips=(2.0, 17.0)),
    "embedding": Kind(embedding, TOKENS, Y),
    "transformer": Kind(transformer, TOKENS, Y, clips=(4.0, 25.0)),
    "lstm": Kind(lstm, normal(ROWS, 3, 2), Y),
    "gru": Kind(gru, normal(ROWS, 3, 2), Y),
    "bidirectional": Kind(bidirectional, normal(ROWS, 3, 2), Y),
    "two_inputs": Kind(two_inputs, [A, B], Y),
    "dict_inputs": Kind(dict_inputs, {"a": A, "b": TOKENS}, Y, clips=(6.0, 25.0)),
    "two_outputs": Kind(
        two_outputs, normal(ROWS, 5), [integers_below(2, ROWS), B[:, :1]],
        [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"], clips=(5.0, 20.0),
    ),
    "shared_layer": Kind(shared_layer, [A, A[::-1].copy()], Y),
    "subclassed": Kind(Subclassed, normal(ROWS, 5), Y),
    "masked": Kind(masked, PADDED.astype(np.int32), Y),
    "integers": Kind(integers, integers_below(9, ROWS, 3), Y, clips=(3.4, 20.0)),
}  # fmt: skip


def take(data, rows):
    """Some examples of a structure of arrays."""
    return tf.nest.map_structure(lambda array: array[rows], data)


def filled(model, x):
    """The model, built, with weights that are the same in every test and nowhere zero."""
    model(tf.nest.map_structure(tf.constant, take(x, slice(0, 1))))
    rng = np.random.default_rng(5)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape) * 0.5)
    return model


def flat(tensors):
    return np.concatenate([np.ravel(np.asarray(t, np.float64)) for t in tensors])


def assign(model, vector):
    for variable in model.trainable_variables:
        size = int(np.prod(variable.shape))
        variable.assign(np.reshape(vector[:size], variable.shape))
        vector = vector[size:]


def sum_of_losses(loss):
    """The Keras losses of all outputs of a batch, added up."""

    def total(y, y_pred):
        names, labels, predictions = (tf.nest.flatten(t) for t in (loss, y, y_pred))
        return sum(keras.losses.get(n)(a, b) for n, a, b in zip(names, labels, predictions))

    return total


def slow_gradients(model, x, y, loss):
    """Gradients of a plain model for `oracle.dp2`: a batch of one for each example.

    Args:
        model: a plain Keras model; its weights are overwritten.
        x, y: the data.
        loss: maps labels and predictions of a batch of one to its loss.
    """

    def gradients(w, rows):
        assign(model, w)
        for row in rows:
            one_x, one_y = (tf.nest.map_structure(tf.constant, take(t, [row])) for t in (x, y))
            with tf.GradientTape() as tape:
                value = loss(one_y, model(one_x, training=True))
            variables = [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]
            found = tape.gradient(value, variables, unconnected_gradients="zero")
            yield flat([tf.convert_to_tensor(g) for g in found])

    return gradients
