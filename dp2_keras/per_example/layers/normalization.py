"""Normalisation within an example: y = gamma x^ + beta.

    g_gamma = sum_t d_t x^_t,    g_beta = sum_t d_t

x^ is the layer's own output with gamma = 1 and beta = 0, so that its formula is Keras's.
"""

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.contributions import Direct
from dp2_keras.per_example.layers import sums
from dp2_keras.per_example.layers.registry import LayerKind

_WEIGHTS = ("gamma", "beta", "scale")
_CLASSES = ("LayerNormalization", "GroupNormalization", "RMSNormalization")


def contributions(layer, inputs, d):
    """Those of the scale and the offset."""
    axes = sorted(axis % d.shape.rank for axis in tf.nest.flatten(layer.axis))
    gradient = Direct(sums.sum_to_axes(d * tf.cast(_normalized(layer, inputs), d.dtype), axes))
    return {"gamma": gradient, "scale": gradient, "beta": Direct(sums.sum_to_axes(d, axes))}


def _normalized(layer, inputs):
    held = {name: getattr(layer, name, None) for name in _WEIGHTS}
    neutral = [
        (v, tf.zeros(v.shape, v.dtype) if name == "beta" else tf.ones(v.shape, v.dtype))
        for name, v in held.items()
        if _keras.is_variable(v)
    ]
    with _keras.substituted(layer, neutral):
        return type(layer).call(layer, inputs)


def register(registry):
    """Adds the normalisations that this Keras has."""
    for name in _CLASSES:
        if hasattr(_keras.keras.layers, name):
            registry.register(getattr(_keras.keras.layers, name), LayerKind(_WEIGHTS, contributions))
