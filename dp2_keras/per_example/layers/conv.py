"""Conv1D, Conv2D, Conv3D: y_p = sum_k patch[p, k] W[k] + b, over groups of channels apart.

    g_W[k] = sum_p patch[p, k] d_p^T,    g_b = sum_p d_p

The patches of a block of examples are made with its gradients.
"""

import math

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.contributions import Contribution
from dp2_keras.per_example.layers import sums
from dp2_keras.per_example.layers.patches import Window, size_of
from dp2_keras.per_example.layers.registry import LayerKind


class OverWindow(Contribution):
    """A kernel's gradients, from inputs [n, *space, in] and d [n, *positions, out]."""

    def __init__(self, window, inputs, d, shape):
        super().__init__([inputs, d], shape)
        self.window = window

    def patches(self, inputs, d):
        """[n, positions, offsets, in]: what the kernel sees at each position."""
        positions = [size_of(d, axis) for axis in range(1, d.shape.rank - 1)]
        return self.window.patches(inputs, positions)

    def elements(self):
        seen = self.operands[1].shape[1:-1].num_elements() or 0
        return math.prod(self.shape) + seen * self.window.count * self.operands[0].shape[-1]


class Convolution(OverWindow):
    """The gradients of a kernel [*size, in / groups, out]."""

    def __init__(self, window, inputs, d, shape):
        super().__init__(window, inputs, d, shape)
        self.groups = inputs.shape[-1] // shape[-2]

    def gradients(self, inputs, d):
        patches = self.patches(inputs, d)
        d = tf.reshape(d, [tf.shape(d)[0], size_of(patches, 1), self.shape[-1]])
        product = _product if self.groups == 1 else self._grouped_product
        return tf.reshape(product(patches, d), [-1, *self.shape])

    def _grouped_product(self, patches, d):
        front, groups = [tf.shape(d)[0], size_of(patches, 1)], self.groups
        patches = tf.reshape(patches, [*front, self.window.count, groups, self.shape[-2]])
        patches = tf.reshape(tf.transpose(patches, [0, 3, 2, 4, 1]), [front[0], groups, -1, front[1]])
        d = tf.reshape(d, [*front, groups, self.shape[-1] // groups])
        product = tf.matmul(patches, tf.transpose(d, [0, 2, 1, 3]))  # [n, groups, offsets * in, out]
        return tf.transpose(product, [0, 2, 1, 3])


def _product(patches, d):
    rows = tf.reshape(patches, [tf.shape(d)[0], size_of(patches, 1), patches.shape[2] * patches.shape[3]])
    return tf.matmul(rows, d, transpose_a=True)


def contributions(layer, inputs, d):
    """Those of the kernel and the bias.

    Raises:
        ValueError: for inputs with further axes, which Keras 2 allows.
    """
    if inputs.shape.rank != len(layer.kernel_size) + 2:
        raise ValueError(
            f"Layer '{layer.name}' ({type(layer).__name__}) must have inputs of rank "
            f'{len(layer.kernel_size) + 2} for `method="ghost"`: compile the model with '
            f'`method="vectorized"`. Received: inputs of shape {inputs.shape}'
        )
    kernel = Convolution(Window.of(layer), inputs, d, layer.kernel.shape)
    return {"kernel": kernel, "bias": sums.bias(d, [layer.filters])}


def refuses(layer):
    """Channels must come last, as they must on a CPU."""
    return None if layer.data_format == "channels_last" else "its channels do not come last"


def register(registry):
    """Adds the convolutions."""
    layers = _keras.keras.layers
    for layer_class in (layers.Conv1D, layers.Conv2D, layers.Conv3D):
        registry.register(layer_class, LayerKind(("kernel", "bias"), contributions, refuses))
