"""SeparableConv1D and 2D: y = z P + b, z the depthwise convolution of x by D.

g_P = sum_p z_p d_p^T,    g_D is the depthwise convolution's, at d P^T,    g_b = sum_p d_p
"""

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.contributions import Outer
from dp2_keras.per_example.layers import conv, sums
from dp2_keras.per_example.layers.depthwise_conv import DepthwiseConvolution
from dp2_keras.per_example.layers.patches import Window
from dp2_keras.per_example.layers.registry import LayerKind


def contributions(layer, inputs, d):
    """Those of the depthwise and the pointwise kernel, and the bias."""
    window, depthwise, pointwise = Window.of(layer), layer.depthwise_kernel, layer.pointwise_kernel
    matrix = tf.reshape(tf.cast(pointwise, d.dtype), [-1, layer.filters])
    middle = _depthwise(window, inputs, tf.cast(depthwise, inputs.dtype))
    flat = [tf.reshape(t, [tf.shape(t)[0], -1, t.shape[-1]]) for t in (middle, d)]
    inner = tf.tensordot(d, matrix, [[-1], [1]])
    return {
        "depthwise_kernel": DepthwiseConvolution(window, inputs, inner, depthwise.shape),
        "pointwise_kernel": Outer(*flat, pointwise.shape),
        "bias": sums.bias(d, [layer.filters]),
    }


def _depthwise(window, x, kernel):
    """z, by TensorFlow's two-dimensional kernel."""
    strides, dilations, padding = window.strides, window.dilations, window.padding.upper()
    if padding == "CAUSAL":
        reach = (window.size[0] - 1) * dilations[0]
        x, padding = tf.pad(x, [[0, 0], [reach, 0], [0, 0]]), "VALID"
    if len(window.size) == 1:
        wide = _depthwise_2d(x[:, None], kernel[None], strides * 2, padding, (1, *dilations))
        return wide[:, 0]
    return _depthwise_2d(x, kernel, strides, padding, dilations)


def _depthwise_2d(x, kernel, strides, padding, dilations):
    return tf.nn.depthwise_conv2d(x, kernel, [1, *strides, 1], padding, dilations=dilations)


def register(registry):
    """Adds the separable convolutions."""
    weights = ("depthwise_kernel", "pointwise_kernel", "bias")
    for name in ("SeparableConv1D", "SeparableConv2D"):
        registry.register(getattr(_keras.keras.layers, name), LayerKind(weights, contributions, conv.refuses))
