"""patches[p, k] = x[p * stride + k * dilation - padding], by each of the ways they are made."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from dp2_keras.per_example.layers import patches
from dp2_keras.per_example.layers.patches import Window

WINDOWS = [
    Window((3,), (2,), (1,), "valid"),
    Window((3,), (2,), (1,), "same"),
    Window((2,), (1,), (3,), "causal"),
    Window((3, 2), (1, 2), (1, 1), "same"),
    Window((2, 3), (2, 1), (1, 1), "valid"),
    Window((2, 2), (1, 1), (2, 3), "same"),
    Window((2, 2, 3), (2, 1, 1), (1, 1, 1), "same"),
    Window((2, 1, 2), (1, 1, 1), (1, 2, 2), "valid"),
]
SPACE = (7, 6, 5)


def geometry(window, axis):
    """How many positions there are along an axis, and how much padding before the first."""
    reach, stride = (window.size[axis] - 1) * window.dilations[axis], window.strides[axis]
    if window.padding == "valid":
        return (SPACE[axis] - reach - 1) // stride + 1, 0
    positions = -(-SPACE[axis] // stride)
    if window.padding == "causal":
        return positions, reach
    return positions, max((positions - 1) * stride + reach + 1 - SPACE[axis], 0) // 2


def slow_patches(window, x):
    axes = range(len(window.size))
    counts, pads = zip(*(geometry(window, axis) for axis in axes))
    result = np.zeros([len(x), *counts, *window.size, x.shape[-1]], np.float32)
    for p in itertools.product(*map(range, counts)):
        for k in itertools.product(*map(range, window.size)):
            place = [p[i] * window.strides[i] + k[i] * window.dilations[i] - pads[i] for i in axes]
            if all(0 <= place[i] < SPACE[i] for i in axes):
                result[(slice(None), *p, *k)] = x[(slice(None), *place)]
    return result.reshape(len(x), np.prod(counts), window.count, x.shape[-1]), list(counts)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("narrow", [0, 10**6])
def test_patches_are_what_the_kernel_sees(window, narrow, monkeypatch):
    monkeypatch.setattr(patches, "_NARROW", narrow)
    x = np.random.default_rng(0).normal(size=(4, *SPACE[: len(window.size)], 3)).astype(np.float32)
    expected, positions = slow_patches(window, x)
    np.testing.assert_array_equal(window.patches(tf.constant(x), positions), expected)
