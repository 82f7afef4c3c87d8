"""A map over examples, all at once, by `tf.vectorized_map`.

    map_examples(f, t)[i] = f(t[i])

Some matrix products of TensorFlow are wrong in it. From 2.16 on with oneDNN, a product of a batch with two
axes or more, such as [8, 1], by one matrix gives wrong numbers or overwrites memory (seen on 2.21; not on
2.14), and what is read past a tensor's end may be another example's. A map that holds one is refused. (The
same product is wrong outside of maps too; Keras's own layers do not make it there.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def map_examples(function: Callable, elements: Any) -> Any:
    """Applies a function to each row of a structure of tensors.

    Args:
        function: maps the structure, without its leading axis, to a structure of tensors.
        elements: tensors whose leading axis is the example.

    Returns:
        What the function gives, stacked.

    Raises:
        ValueError: if the function holds a matrix product that TensorFlow gets wrong in a map.

    Example:
    >>> map_examples(lambda x: 2.0 * x, tf.constant([1.0, 2.0])).numpy().tolist()
    [2.0, 4.0]
    """
    if tf.executing_eagerly():  # In a graph of its own, as TensorFlow would, but one that can be read.
        return tf.function(lambda rows: map_examples(function, rows), autograph=False)(elements)
    graph = tf.compat.v1.get_default_graph()
    start = len(graph.get_operations())
    # Dropout's random numbers have no vectorized form, and would warn in every model.
    result = tf.vectorized_map(function, elements, warn=False)
    if _broadcasts_wrongly():
        _check_products(_with_called(graph, graph.get_operations()[start:]))
    return result


def _broadcasts_wrongly():
    recent = tuple(int(part) for part in tf.__version__.split(".")[:2]) >= (2, 16)
    return recent and os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0"


def _with_called(graph, operations):
    """The operations, and those of the functions that they call."""
    for operation in operations:
        yield operation
        attributes = operation.node_def.attr.values()
        for called in [f.name for a in attributes for f in (a.func, *a.list.func) if f.name]:
            inner = graph._get_function(called).graph
            yield from _with_called(inner, inner.get_operations())


def _check_products(operations):
    for operation in operations:
        if operation.type.startswith("BatchMatMul") and _is_by_one_matrix(*operation.inputs):
            raise ValueError(
                "A matrix product of this model multiplies all examples by one matrix, which this TensorFlow "
                'gets wrong inside a map over examples: compile with `method="ghost"` or "loop", or set '
                "TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported. Received: a product of shapes "
                f"{operation.inputs[0].shape} and {operation.inputs[1].shape}"
            )


def _is_by_one_matrix(left, right):
    """Whether the right side may have to be repeated over two batch axes or more of the left one."""
    many, one = left.shape[:-2].as_list(), right.shape[:-2].as_list()
    return len(many) > 1 and set(many) != {1} and many != one and set(one) <= {1, None}
