"""Dense: y = a W + b, over the last axis of a.

g_W = sum_t a_t d_t^T,    g_b = sum_t d_t,    t over all axes between the first and the last
"""

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.contributions import Outer
from dp2_keras.per_example.layers import sums
from dp2_keras.per_example.layers.registry import LayerKind
from dp2_keras.per_example.sparse import SparseOuter


def contributions(layer, inputs, d):
    """Those of the kernel and the bias."""
    bias = sums.bias(d, [layer.units])
    if isinstance(inputs, tf.SparseTensor):
        return {"kernel": SparseOuter(inputs, d, layer.kernel.shape), "bias": bias}
    inputs = tf.cast(inputs, d.dtype)  # They may be integers.
    kernel = Outer(_with_one_time_axis(inputs), _with_one_time_axis(d), layer.kernel.shape)
    return {"kernel": kernel, "bias": bias}


def _with_one_time_axis(tensor):
    if tensor.shape.rank == 2:
        return tensor
    time = tensor.shape[1:-1].num_elements()
    return tf.reshape(tensor, [tf.shape(tensor)[0], -1 if time is None else time, tensor.shape[-1]])


def register(registry):
    """Adds `Dense`."""
    registry.register(_keras.keras.layers.Dense, LayerKind(("kernel", "bias"), contributions))
