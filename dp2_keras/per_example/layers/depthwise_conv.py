"""DepthwiseConv1D and 2D: y_p[c, m] = sum_k patch[p, k, c] W[k, c, m] + b[c, m].

g_W[k, c, m] = sum_p patch[p, k, c] d_p[c, m],    g_b = sum_p d_p
"""

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.layers import conv, sums
from dp2_keras.per_example.layers.patches import Window, size_of
from dp2_keras.per_example.layers.registry import LayerKind


class DepthwiseConvolution(conv.OverWindow):
    """The gradients of a kernel [*size, c, m]."""

    def gradients(self, inputs, d):
        patches = self.patches(inputs, d)
        d = tf.reshape(d, [tf.shape(d)[0], size_of(patches, 1), *self.shape[-2:]])
        product = tf.matmul(tf.transpose(patches, [0, 3, 2, 1]), tf.transpose(d, [0, 2, 1, 3]))
        return tf.reshape(tf.transpose(product, [0, 2, 1, 3]), [-1, *self.shape])


def contributions(layer, inputs, d):
    """Those of the kernel, whose name is not the same in both Keras generations, and the bias."""
    shape = getattr(layer, "kernel" if hasattr(layer, "kernel") else "depthwise_kernel").shape
    kernel = DepthwiseConvolution(Window.of(layer), inputs, d, shape)
    return {"kernel": kernel, "depthwise_kernel": kernel, "bias": sums.bias(d, [d.shape[-1]])}


def register(registry):
    """Adds the depthwise convolutions."""
    kind = LayerKind(("kernel", "depthwise_kernel", "bias"), contributions, conv.refuses)
    for name in ("DepthwiseConv1D", "DepthwiseConv2D"):
        registry.register(getattr(_keras.keras.layers, name), kind)
