"""Variables that are no part of the model: counters, keys, the log."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


def own_variable(value: Any, dtype: tf.DType) -> tf.Variable:
    """A variable of which there is one, also inside the scope of a strategy, which would mirror it.

    It is not in any checkpoint as long as a plain object holds it.

    Args:
        value: what it starts with.
        dtype: its type.

    Example:
    >>> int(own_variable(0, tf.int64).assign_add(1))
    1
    """
    with tf.init_scope():
        return ResourceVariable(value, trainable=False, dtype=dtype)
