"""The gradients of single examples, all of them kept: for public data alone.

    each_gradient(pass, t)[i] = gradient of example i's own loss

What comes of it is not clipped and not summed, so that it may never be of private examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dp2_keras.per_example.mapping import map_examples


def each_gradient(
    gradient_fn: Callable, variables: Sequence, examples: Any, *, one_by_one: bool = False
) -> list[tf.Tensor]:
    """Computes a gradient per public example.

    Args:
        gradient_fn: maps one example to (gradients, outputs).
        variables: what the gradients are of.
        examples: a structure of tensors whose leading axis is the example.
        one_by_one: whether to take one after another, for models that cannot be vectorized.

    Returns:
        Per variable a tensor [n, *variable].
    """
    gradients = lambda example: gradient_fn(example)[0]  # noqa: E731
    if not one_by_one:
        return map_examples(gradients, examples)
    like = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    return tf.map_fn(gradients, examples, fn_output_signature=like, parallel_iterations=1)
