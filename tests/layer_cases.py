"""A tiny model for each layer kind of the ghost path, with data; see `test_ghost.py`."""

import keras
import tensorflow as tf
import zoo
from keras import layers
from zoo import ROWS, integers_below, normal

import dp2_keras as dp2

KERAS_3 = hasattr(keras, "StatelessScope")


def chain(*stack, shape, dtype="float32"):
    """A Sequential of these layers, flattened into two outputs."""
    return keras.Sequential([keras.Input(shape, dtype=dtype), *stack, layers.Flatten(), layers.Dense(2)])


def over(data, *make_layers):
    """A case: how to build the model, and its inputs."""
    return lambda: chain(*(make() for make in make_layers), shape=data.shape[1:], dtype=data.dtype.name), data


SEQUENCE, IMAGE, VOLUME = normal(ROWS, 6, 3), normal(ROWS, 5, 6, 2), normal(ROWS, 4, 3, 4, 2)
TOKENS = integers_below(4, ROWS, 5)  # Few, so that each example repeats some.


def conv(layer, *args, **kwargs):
    return lambda: layer(*args, activation="tanh", **kwargs)


FORMULA = {
    "dense": over(normal(ROWS, 5), lambda: layers.Dense(4, "tanh")),
    "dense_without_bias": over(normal(ROWS, 5), lambda: layers.Dense(4, use_bias=False)),
    "dense_over_time": over(SEQUENCE, lambda: layers.Dense(4, "relu")),
    "dense_over_one_step": over(SEQUENCE[:, :1], lambda: layers.Dense(4)),
    "dense_wide_over_time": over(normal(ROWS, 2, 12), lambda: layers.Dense(13)),
    "dense_over_space": over(IMAGE, lambda: layers.Dense(3, "tanh")),
    "einsum": over(SEQUENCE, lambda: layers.EinsumDense("abc,cd->abd", (6, 4), "tanh", "d")),
    "einsum_two_summed": over(SEQUENCE, lambda: layers.EinsumDense("abc,bcd->ad", (4,), None, "d")),
    "einsum_two_free": over(SEQUENCE, lambda: layers.EinsumDense("abc,cde->abde", (6, 2, 2), None, "de")),
    "einsum_across_time": over(SEQUENCE, lambda: layers.EinsumDense("abc,bd->adc", (4, 3), None, "d")),
    "einsum_ellipsis": over(SEQUENCE, lambda: layers.EinsumDense("...x,xy->...y", 4, None, "y")),
    "embedding": over(TOKENS, lambda: layers.Embedding(7, 3)),
    "embedding_of_one": over(TOKENS[:, :1], lambda: layers.Embedding(7, 3)),
    "embedding_rank_3": over(integers_below(4, ROWS, 2, 3), lambda: layers.Embedding(7, 2)),
    "embedding_pooled": over(TOKENS, lambda: layers.Embedding(7, 3), layers.GlobalAveragePooling1D),
    "conv1d": over(SEQUENCE, conv(layers.Conv1D, 3, 2)),
    "conv1d_same_strided": over(SEQUENCE, conv(layers.Conv1D, 3, 3, strides=2, padding="same")),
    "conv1d_causal_dilated": over(SEQUENCE, conv(layers.Conv1D, 3, 2, padding="causal", dilation_rate=2)),
    "conv2d": over(IMAGE, conv(layers.Conv2D, 3, (2, 3), use_bias=False)),
    "conv2d_same_strided": over(IMAGE, conv(layers.Conv2D, 3, 3, strides=2, padding="same")),
    "conv2d_dilated": over(IMAGE, conv(layers.Conv2D, 3, 2, dilation_rate=2)),
    "conv3d": over(VOLUME, conv(layers.Conv3D, 3, 2, strides=(1, 1, 2), padding="same")),
    "depthwise1d": over(SEQUENCE, conv(layers.DepthwiseConv1D, 3, depth_multiplier=2, padding="same")),
    "depthwise2d": over(IMAGE, conv(layers.DepthwiseConv2D, 2, strides=2, depth_multiplier=2)),
    "separable1d": over(SEQUENCE, conv(layers.SeparableConv1D, 3, 2, padding="same")),
    "separable2d": over(IMAGE, conv(layers.SeparableConv2D, 3, 2, depth_multiplier=2, padding="same")),
    "layer_norm": over(SEQUENCE, layers.LayerNormalization),
    "layer_norm_two_axes": over(SEQUENCE, lambda: layers.LayerNormalization(axis=[1, 2])),
    "layer_norm_without_offset": over(SEQUENCE, lambda: layers.LayerNormalization(center=False)),
    "group_norm": over(normal(ROWS, 3, 4), lambda: layers.GroupNormalization(2)),
}  # fmt: skip
if KERAS_3:
    FORMULA["rms_norm"] = over(SEQUENCE, layers.RMSNormalization)
    FORMULA["rms_scaled_layer_norm"] = over(SEQUENCE, lambda: layers.LayerNormalization(rms_scaling=True))
    FORMULA["conv2d_groups"] = over(IMAGE, conv(layers.Conv2D, 4, 2, groups=2))


def attention():
    x = keras.Input((4, 3))
    mixed = layers.MultiHeadAttention(2, 2)(layers.Dense(3)(x), x)
    return keras.Model(x, layers.Dense(2)(layers.Flatten()(mixed)))


def factors():
    """Matrix factorisation: the product of two rows."""
    ids = keras.Input((5,), dtype="int32")
    rows = [layers.Flatten()(layers.Embedding(7, 3)(ids)) for _ in range(2)]
    return keras.Model(ids, layers.Dense(2)(layers.Dot(axes=1)(rows)))


def masked():
    """A mean over the tokens that are not padding: Keras 3 notes the comparison as an operation."""
    tokens = keras.Input((5,), dtype="int32")
    embedded = layers.Rescaling(0.5)(layers.Embedding(7, 3, mask_zero=True)(tokens))
    return keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(embedded)))


def used_twice():
    """A table and a dense layer with a time axis and without one, each called twice."""
    tokens = keras.Input((5,), dtype="int32")
    table, dense = layers.Embedding(7, 3), layers.Dense(3, "tanh")
    pooled = layers.GlobalAveragePooling1D()(dense(table(tokens)))
    flipped = layers.GlobalMaxPooling1D()(table(layers.Permute((1,))(tokens)))
    return keras.Model(tokens, layers.Dense(2)(layers.Add()([dense(pooled), flipped])))


def nested():
    inner = keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(3)])
    return keras.Sequential([keras.Input((5,)), inner, layers.Dense(2)])


def residual():
    x = keras.Input((5,))
    return keras.Model(x, layers.Dense(2)(x * 2.0 + layers.Dense(5, "relu")(x)))


def frozen():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(4, "tanh"),
            layers.Dense(3, kernel_initializer="ones"),
            layers.Dense(2),
        ]
    )
    model.layers[1].trainable = False
    return model


MODELS = {
    "attention": (attention, normal(ROWS, 4, 3)),
    "factors": (factors, TOKENS),
    "masked": (masked, TOKENS),
    "used_twice": (used_twice, TOKENS),
    "nested": (nested, normal(ROWS, 5)),
    "residual": (residual, normal(ROWS, 5)),
    "frozen": (frozen, normal(ROWS, 5)),
    "transformer": (zoo.transformer, zoo.TOKENS),
}


@dp2.declare_per_example
class Twofold(layers.Layer):
    """A layer that no formula knows: tanh(x W) W + b."""

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], shape[-1]), name="matrix")
        self.offset = self.add_weight(shape=(shape[-1],), name="offset")

    def call(self, inputs):
        hidden = tf.tanh(tf.tensordot(inputs, self.matrix, 1))
        return tf.tensordot(hidden, self.matrix, 1) + self.offset


@dp2.declare_per_example
class Tied(layers.Layer):
    """One table for words and for the scores of words: E[id], and h E^T."""

    def build(self, shape):
        self.table = self.add_weight(shape=(7, 3), name="table")

    def call(self, inputs, reverse=False):
        if reverse:
            return tf.tensordot(inputs, tf.transpose(self.table), 1)
        return tf.gather(self.table, inputs)


def tied():
    tokens, table = keras.Input((5,), dtype="int32"), Tied()
    hidden = layers.Dense(3, "tanh")(layers.GlobalAveragePooling1D()(table(tokens)))
    return keras.Model(tokens, layers.Dense(2)(table(hidden, reverse=True)))


MADE = {
    "tied": (tied, TOKENS),
    "lstm": over(SEQUENCE, lambda: layers.LSTM(3)),
    "gru_sequences": over(SEQUENCE, lambda: layers.GRU(2, return_sequences=True)),
    "prelu": over(SEQUENCE, layers.PReLU),
    "custom": over(SEQUENCE, Twofold),
    "conv_transpose": over(IMAGE, lambda: layers.Conv2DTranspose(2, 2)),
}

ALL = {**FORMULA, **MODELS, **MADE}
LABELS = normal(ROWS, 2, seed=2)
