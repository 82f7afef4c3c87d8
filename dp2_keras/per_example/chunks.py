"""The clipped sum of a batch, chunk by chunk.

    sum_i clip(S g_i, C) = sum_chunks sum_{i in chunk} clip(S g_i, C)

The batch is padded with masked rows, to one of a few sizes for XLA and to a multiple of the chunk, so
that every chunk has one shape and an empty batch is one chunk of padding. Neither the sum nor the
outputs depend on the chunk's size, but for the rounding of a float sum and, under ghost, for what is random
in a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dp2_keras.privatizer import ClippedSum, ClippingQuery


@dataclasses.dataclass(frozen=True)
class PerExampleResult:
    """What a pass over a batch gives.

    Attributes:
        clipped_sum: the `ClippedSum` for the optimizer.
        norms: float32 [n], norms of the scaled gradients; 0 for an example left out.
        outputs: what `gradient_fn` returned beside the gradients, stacked to [n, ...].
    """

    clipped_sum: ClippedSum
    norms: tf.Tensor
    outputs: Any


def clipped_sum(
    strategy: Callable,
    gradient_fn: Callable,
    query: ClippingQuery,
    examples: Any,
    physical_batch_size: int | None = None,
    *,
    padded_size: Callable | None = None,
    compiled: Callable = lambda function: function,
) -> PerExampleResult:
    """Answers a clipping query over a batch.

    Args:
        strategy: `ghost`, `vectorized` or `loop`: (gradient_fn, query, chunk, mask) to
            (summed values, norms, outputs).
        gradient_fn: maps one example to (gradients, outputs). Gradients are one dense
            tensor per variable of the query.
        query: what may be asked of the data.
        examples: a structure of tensors whose leading axis is the example.
        physical_batch_size: how many examples to hold in memory at a time. Defaults
            to all of them.
        padded_size: the size to pad a batch of unknown size to, of how many examples there are.
            Defaults to no padding.
        compiled: compiles a function of tensors, such as `xla.compiled`.
            Defaults to leaving it as it is.

    Returns:
        A `PerExampleResult`.
    """
    count = batch_size(examples)
    total = count if padded_size is None or isinstance(count, int) else padded_size(count)
    total = _at_least_one(total)
    if physical_batch_size is not None:
        total = -(-total // physical_batch_size) * physical_batch_size
    padded, mask = _pad(examples, count, total)

    def answer(examples, mask):
        if physical_batch_size is None:
            return strategy(gradient_fn, query, examples, mask)
        return _accumulate(strategy, gradient_fn, query, examples, mask, physical_batch_size)

    values, norms, outputs = compiled(answer)(padded, mask)
    trim = lambda t: t[:count]  # noqa: E731
    return PerExampleResult(ClippedSum(query, values), norms[:count], tf.nest.map_structure(trim, outputs))


def batch_size(examples):
    """The number of examples: an integer where it is static, else a tensor."""
    first = tf.nest.flatten(examples)[0]
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]


def _at_least_one(count):
    return max(count, 1) if isinstance(count, int) else tf.maximum(count, 1)


def _pad(examples, count, total):
    def pad(tensor):
        rows = [[0, total - count]] + [[0, 0]] * (tensor.shape.rank - 1)
        return tf.pad(tensor, rows)

    if isinstance(total, int) and total == count:
        return examples, tf.ones([count], tf.bool)
    return tf.nest.map_structure(pad, examples), tf.range(total) < count


def _accumulate(strategy, gradient_fn, query, examples, mask, size):
    """The chunks in a loop, in the memory of one of them."""
    specs = _output_specs(gradient_fn, examples)
    chunks = batch_size(mask) // size
    arrays = [
        tf.TensorArray(spec.dtype, size=chunks, element_shape=[size, *spec.shape])
        for spec in [tf.TensorSpec([], tf.float32), *tf.nest.flatten(specs)]
    ]

    def body(index, values, arrays):
        chunk = tf.nest.map_structure(lambda t: _rows(t, index, size), examples)
        more, norms, outputs = strategy(gradient_fn, query, chunk, _rows(mask, index, size))
        values = [a + b for a, b in zip(values, more)]
        rows = [norms, *tf.nest.flatten(outputs)]
        return index + 1, values, [array.write(index, r) for array, r in zip(arrays, rows)]

    _, values, arrays = tf.while_loop(
        lambda index, *_: index < chunks, body, (0, query.zeros(), arrays), parallel_iterations=1
    )
    norms, *outputs = [_merge(array.stack()) for array in arrays]
    return values, norms, tf.nest.pack_sequence_as(specs, outputs)


def _rows(tensor, index, size):
    """Chunk number `index`; its size is a constant, which XLA wants to see."""
    shape = tf.concat([[size], tf.shape(tensor)[1:]], axis=0)
    rows = tf.slice(tensor, tf.pad([index * size], [[0, tensor.shape.rank - 1]]), shape)
    rows.set_shape([size, *tensor.shape[1:]])
    return rows


def _merge(stacked):
    return tf.reshape(stacked, tf.concat([[-1], tf.shape(stacked)[2:]], axis=0))


def _output_specs(gradient_fn, examples):
    """Shapes and dtypes of one example's outputs, found by tracing."""
    spec = lambda t: tf.TensorSpec(t.shape[1:], t.dtype)  # noqa: E731
    one = tf.nest.map_structure(spec, examples)
    traced = tf.function(lambda example: gradient_fn(example)[1], autograph=False)
    outputs = traced.get_concrete_function(one).structured_outputs
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), outputs)
