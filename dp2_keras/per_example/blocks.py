"""Work over the examples of a batch, block by block, in the memory of one block.

    map_blocks(f, t)[i] = f(t)[i]           f gives a row per example
    sum_blocks(f, t)    = sum over blocks of f(block)

The last block is filled up with rows of zeros, whose `f` does not count in a map, and
must be zero in a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

BLOCK_ELEMENTS = 1 << 22  # 16 MB of float32.
HELD_ELEMENTS = 1 << 24  # 64 MB, and what is made of them: a small network needs no blocks for a batch.


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
    shape = [size if isinstance(size, int) else None]
    rows = tf.TensorArray(tf.float64, count, element_shape=shape)
    rows = _loop(count, lambda i, rows: rows.write(i, function(*(block[i] for block in blocks))), rows)
    return tf.reshape(rows.stack(), [-1])[: row_count(tensors[0])]


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
    return _loop(count, lambda i, total: total + function(*(block[i] for block in blocks)), zero)


def _loop(count, step, state):
    """step(count - 1, ... step(0, state)), one after another."""
    body = lambda i, state: (i + 1, step(i, state))  # noqa: E731
    return tf.while_loop(lambda i, _: i < count, body, (0, state), parallel_iterations=1)[1]


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
        pad = lambda: tf.pad(tensor, [[0, count * size - rows]] + [[0, 0]] * (tensor.shape.rank - 1))  # noqa: E731
        padded = tf.cond(tf.equal(count * size, rows), lambda: tensor, pad)  # Which copies, even for no rows.
        return tf.reshape(padded, tf.concat([[count, size], tf.shape(tensor)[1:]], axis=0))

    return tuple(blocks(t) for t in tensors), count, size
