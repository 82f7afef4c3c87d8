"""Sums over the axes that a weight was broadcast along."""

import tensorflow as tf

from dp2_keras.per_example.contributions import Direct


def sum_to_axes(tensor, axes):
    """Sums over all axes but the first and the given ones, which keep their order."""
    kept = {0, *(axis % tensor.shape.rank for axis in axes)}
    return tf.reduce_sum(tensor, axis=[axis for axis in range(tensor.shape.rank) if axis not in kept])


def bias(d, shape):
    """b_i = sum of d_i over the axes that b was broadcast along, where b is added to the output."""
    first = d.shape.rank - len(shape)
    axes = [first + k for k, size in enumerate(shape) if size != 1]
    return Direct(tf.reshape(sum_to_axes(d, axes), [-1, *shape]))
