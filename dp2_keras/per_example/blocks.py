"""Work over the examples of a batch, block by block, in the memory of one block.

    map_blocks(f, t)[i] = f(t)[i]           f gives a row per example
    sum_blocks(f, t)    = sum over blocks of f(block)

The last block is filled up with rows of zeros, whose `f` does not count in a map, and
must be zero in a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

BLOCK_ELEMENTS = 1 << 20  # 4 MB of float32, which stays in a cache.


def map_blocks(function: Callable, tensors: Sequence[tf.Tensor], elements: int) -> tf.Tensor:
    """Applies a function that gives a number per example.

    Args:
        function: maps [m, ...] tensors to float64 [m].
        tensors: of shape [n, ...].
        elements: how many numbers the function holds for one example.

    Returns:
        float64 [n].
    """
    blocks, count, size = _split(tensors, elements)
    if isinstance(count, int) and count == 1:
        return function(*tensors)
    rows = tf.map_fn(
        lambda block: function(*block),
        blocks,
        fn_output_signature=tf.TensorSpec([size if isinstance(size, int) else None], tf.float64),
        parallel_iterations=1,
    )
    return tf.reshape(rows, [-1])[: row_count(tensors[0])]


def sum_blocks(function: Callable, tensors: Sequence[tf.Tensor], elements: int, zero: tf.Tensor) -> tf.Tensor:
    """Adds up what a function gives for each block.

    Args:
        function: maps [m, ...] tensors to a tensor like `zero`.
        tensors: of shape [n, ...].
        elements: how many numbers the function holds for one example.
        zero: the sum over no examples.
    """
    blocks, count, _ = _split(tensors, elements)
    if isinstance(count, int) and count == 1:
        return function(*tensors)
    return tf.foldl(
        lambda total, block: total + function(*block), blocks, initializer=zero, parallel_iterations=1
    )


def row_count(tensor):
    """The number of rows: an integer where it is static, else a tensor."""
    return tensor.shape[0] if tensor.shape[0] is not None else tf.shape(tensor)[0]


def _split(tensors, elements):
    """The tensors as [count, size, ...]: as few blocks as the limit allows, all of one size."""
    rows = row_count(tensors[0])
    limit = max(BLOCK_ELEMENTS // max(elements, 1), 1)
    count = -(-rows // limit)
    size = -(-rows // count)

    def blocks(tensor):
        padded = tf.pad(tensor, [[0, count * size - rows]] + [[0, 0]] * (tensor.shape.rank - 1))
        return tf.reshape(padded, tf.concat([[count, size], tf.shape(tensor)[1:]], axis=0))

    return tuple(blocks(t) for t in tensors), count, size
