"""What a kernel sees at each position of a convolution's output.

    patches[p, k] = x[p * stride + k * dilation - padding]

Positions p and kernel offsets k have as many axes as the layer has dimensions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import tensorflow as tf

# Patches of at most so many numbers come fastest of a convolution with the identity; wider ones of
# TensorFlow's own operation, which is slow for few channels and not there for three dimensions.
_NARROW = 128


@dataclasses.dataclass(frozen=True)
class Window:
    """The geometry of a convolution, its channels last.

    Attributes:
        size, strides, dilations: one integer per dimension.
        padding: "valid", "same" or "causal".
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: str

    @classmethod
    def of(cls, layer) -> Window:
        """That of a Keras layer."""
        return cls(*map(tuple, (layer.kernel_size, layer.strides, layer.dilation_rate)), layer.padding)

    @property
    def count(self) -> int:
        """How many offsets the kernel has."""
        return math.prod(self.size)

    def patches(self, x: tf.Tensor, positions: list) -> tf.Tensor:
        """The patches [n, positions, offsets, channels] of x [n, *space, channels].

        Args:
            x: the input.
            positions: the output's size along each dimension.
        """
        channels = x.shape[-1]
        if self.count * channels <= _NARROW:
            seen = self.convolve(
                x, tf.reshape(tf.eye(self.count * channels, dtype=x.dtype), [*self.size, channels, -1])
            )
        elif len(self.size) < 3:
            seen = self._extracted(x)
        else:
            seen = self._sliced(x, positions)
        return tf.reshape(seen, [-1, _product(positions), self.count, channels])

    def convolve(self, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """The layer's convolution with another kernel [*size, channels, filters]."""
        x, padding = self._without_causal(x)
        layout = {1: "NWC", 2: "NHWC", 3: "NDHWC"}[len(self.size)]  # Conv3D's gradient asks for it.
        return tf.nn.convolution(x, kernel, self.strides, padding, layout, self.dilations)

    def _extracted(self, x):
        x, padding = self._without_causal(x)
        if len(self.size) == 1:
            x = x[:, None]
        sizes, strides, rates = (
            [1, *[1] * (2 - len(t)), *t, 1] for t in (self.size, self.strides, self.dilations)
        )
        return tf.image.extract_patches(x, sizes, strides, rates, padding)

    def _without_causal(self, x):
        if self.padding != "causal":
            return x, self.padding.upper()
        reach = (self.size[0] - 1) * self.dilations[0]
        return tf.pad(x, [[0, 0], [reach, 0], [0, 0]]), "VALID"

    def _sliced(self, x, positions):
        x = tf.pad(x, [[0, 0], *(self._pads(x, positions, k) for k in range(len(self.size))), [0, 0]])
        seen = [self._strided(x, offset, positions) for offset in itertools.product(*map(range, self.size))]
        return tf.stack(seen, axis=-2)

    def _strided(self, x, offset, positions):
        starts = [k * dilation for k, dilation in zip(offset, self.dilations)]
        slices = [slice(b, b + (p - 1) * s + 1, s) for b, p, s in zip(starts, positions, self.strides)]
        return x[(slice(None), *slices)]

    def _pads(self, x, positions, axis):
        reach = (self.size[axis] - 1) * self.dilations[axis]
        if self.padding == "valid":
            return [0, 0]
        space = size_of(x, axis + 1)
        missing = (positions[axis] - 1) * self.strides[axis] + reach + 1 - space
        missing = max(missing, 0) if isinstance(missing, int) else tf.maximum(missing, 0)
        return [missing // 2, missing - missing // 2]


def size_of(tensor, axis):
    """The size along an axis: an integer where it is static, else a tensor."""
    return tensor.shape[axis] if tensor.shape[axis] is not None else tf.shape(tensor)[axis]


def _product(sizes):
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else -1
