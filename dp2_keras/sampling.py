"""Poisson sampling: the batches that the accounting prices.

    P(example i is in the batch of step t) = q = B / n,   independently for all i and t

drawn in O(batch) operations as a size k ~ Binomial(n, q) and then k of the n rows without
replacement, which is the same law. n is public and T, the number of steps, depends on n and B
alone. The draw of a step is a function of (key, step); the key is as secret as the noise's: it comes
from the operating system unless there is a seed, and is in no file, graph or log.

XLA compiles once for each size of batch, so a batch is padded before it (the rows it pads with are
masked out of the sum) to one of a few sizes:

    B, B + s, B + 2 s, B + 4 s, ...   with s = ceil(sqrt(B)), about one deviation of k

Half of the draws fit into the first. Nothing is ever truncated unless `max_batch_size` says so.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dp2_keras import _checks
from dp2_keras.entries import PoissonSampling
from dp2_keras.rows import Rows

_STEPS_AT_ONCE = 16  # A call of Python costs as much as ten draws.


class PoissonSampler:
    """Draws the rows of each step.

    Args:
        dataset_size: n, the public number of examples.
        batch_size: B, the expected size of a batch, at most n.
        max_batch_size: M, at most so many of the rows drawn are kept; None keeps all. A
            truncated draw is priced, see `accounting`.
        seed: integer, for tests and experiments only; None takes a secret key.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> sampler = PoissonSampler(dataset_size=1000, batch_size=10, seed=0)
    >>> rows = sampler.rows(step=0)
    >>> len(set(rows)) == len(rows) < 40
    True
    """

    def __init__(
        self,
        dataset_size: int,
        batch_size: int,
        *,
        max_batch_size: int | None = None,
        seed: int | None = None,
    ):
        check_sizes(dataset_size, batch_size, max_batch_size)
        self.dataset_size = dataset_size
        self.batch_size = batch_size
        self.max_batch_size = max_batch_size
        self.seed = seed
        self._key = _fresh_key(seed)
        self._draws = itertools.count()

    def rows(self, step: int) -> np.ndarray:
        """The sorted rows of a step: int64, of any length from 0.

        With a seed they are a function of the step, so that a resumed run repeats the
        uninterrupted one. Without, no draw is ever repeated, whatever the step.
        """
        counter = step if self.seed is not None else next(self._draws)
        rng = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, counter]))
        count = rng.binomial(self.dataset_size, self.batch_size / self.dataset_size)
        rows = rng.choice(self.dataset_size, count, replace=False, shuffle=False)
        if self.max_batch_size is not None and count > self.max_batch_size:
            rows = rng.choice(rows, self.max_batch_size, replace=False, shuffle=False)
        return np.sort(rows)

    def __repr__(self):
        return f"PoissonSampler(dataset_size={self.dataset_size}, batch_size={self.batch_size})"

    def __reduce__(self):  # A copy has a key of its own.
        arguments = dict(max_batch_size=self.max_batch_size, seed=self.seed)
        return _copy, (self.dataset_size, self.batch_size, arguments)


def _copy(dataset_size, batch_size, arguments):
    return PoissonSampler(dataset_size, batch_size, **arguments)


def _fresh_key(seed):
    secret = secrets.token_bytes(16)
    if seed is not None:
        secret = hashlib.sha256(f"dp2_keras sampling:{seed}".encode()).digest()[:16]
    return np.frombuffer(secret, np.uint64)


def check_sizes(dataset_size: int, batch_size: int, max_batch_size: int | None = None) -> None:
    """Refuses sizes of which no rate can be made."""
    _checks.positive_integer(dataset_size=dataset_size, batch_size=batch_size)
    if batch_size > dataset_size:
        _checks.fail(
            "at most `dataset_size`, for a sampling rate of at most 1",
            batch_size=batch_size,
            dataset_size=dataset_size,
        )
    if max_batch_size is not None:
        _checks.positive_integer(max_batch_size=max_batch_size)


def poisson_batches(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int,
    steps: int | None = None,
    max_batch_size: int | None = None,
    seed: int | None = None,
    first_step: int = 0,
) -> tf.data.Dataset:
    """Poisson batches of arrays, as `fit` draws them, for custom loops.

    Each element is (x,), (x, y) or (x, y, sample_weight) of the rows drawn, of any number
    from 0. Train on them with `model.fit(batches)`, which knows how they were drawn. It does not
    know it of what is made of them, as by `map`: declare that with `sampling="poisson"`,
    `dataset_size=n` and `expected_batch_size=batch_size` in the optimizer, and so in
    `train_on_batch`. Caching or repeating the batches would draw the same ones again, which is not
    Poisson sampling.

    Args:
        x: inputs: an array, a tensor, a scipy sparse matrix, a `tf.SparseTensor`, or a dict, tuple
            or list of them; or anything with `len` and `[rows]` for sorted integer rows, such as a
            `numpy.memmap` or an h5py data set that does not fit in memory.
        y: labels, likewise.
        sample_weight: weights, likewise.
        batch_size: B, the expected size.
        steps: how many batches; None is without end.
        max_batch_size: truncate larger draws, which costs privacy.
        seed: integer, for tests and experiments only: a known seed voids the guarantee.
        first_step: the number of the first step; with a seed, the draw of a step depends on it.

    Returns:
        A `tf.data.Dataset`.

    Raises:
        ValueError: for sizes out of range, or if x, y and sample_weight differ in length.

    Example:
    >>> batches = poisson_batches(np.eye(100), batch_size=10, steps=3, seed=0)
    >>> [x.shape[1] for x, in batches]
    [100, 100, 100]
    """
    rows = Rows.of((x, y, sample_weight))
    sampler = PoissonSampler(len(rows), batch_size, max_batch_size=max_batch_size, seed=seed)
    if steps is not None:
        _checks.positive_integer(steps=steps)
    batches = dataset_of(rows, sampler, lambda: first_step, steps)
    batches.dp2_sampling = PoissonSampling(len(rows), batch_size, max_batch_size, seeded=seed is not None)
    return batches


def known_sampling(batches: Any) -> PoissonSampling | None:
    """How the batches of `poisson_batches` were drawn; None for any others."""
    return getattr(batches, "dp2_sampling", None) if isinstance(batches, tf.data.Dataset) else None


def dataset_of(
    rows: Rows,
    sampler: PoissonSampler,
    first_step: Callable[[], int],
    steps: int | None = None,
    replicas: range = range(1),
    of: int = 1,
) -> tf.data.Dataset:
    """The batches of a sampler.

    Args:
        rows: of the data.
        sampler: draws their numbers.
        first_step: is asked whenever an iteration starts.
        steps: how many batches; None is without end.
        replicas: the replicas whose batches these are, one after the other in each step.
        of: how many replicas there are. Replica k has the rows r = k (mod `of`). A worker that draws for
            itself and keeps the rows of its own replicas so draws from them as one would from all rows:
            Poisson sampling takes each row independently of all others.
    """
    first = 0
    share = lambda numbers: [numbers[numbers % of == k] for k in replicas]  # noqa: E731

    def draw(block):
        nonlocal first
        if block == 0:
            first = first_step()
        start = first + int(block) * _STEPS_AT_ONCE
        steps = range(start, start + _STEPS_AT_ONCE)
        drawn = [numbers for step in steps for numbers in share(sampler.rows(step))]
        return np.concatenate(drawn), np.array([len(numbers) for numbers in drawn], np.int64)

    in_a_block = _STEPS_AT_ONCE * len(replicas)

    def draws(block):
        numbers, lengths = tf.numpy_function(draw, [block], (tf.int64, tf.int64))
        numbers, lengths = tf.ensure_shape(numbers, [None]), tf.ensure_shape(lengths, [in_a_block])
        return tf.RaggedTensor.from_row_lengths(numbers, lengths, validate=False)

    drawn = tf.data.Dataset.counter().map(draws).unbatch()
    count = tf.data.INFINITE_CARDINALITY if steps is None else steps
    drawn = drawn.take(count).apply(tf.data.experimental.assert_cardinality(count))
    return rows.batches(drawn.map(lambda numbers: tf.ensure_shape(numbers, [None]))).prefetch(2)


def padded_size(count: tf.Tensor, batch_size: int) -> tf.Tensor:
    """The least of the sizes at the top of this file that holds `count` rows.

    Args:
        count: how many rows there are, an int32 scalar.
        batch_size: B.

    Example:
    >>> [int(padded_size(k, batch_size=64)) for k in (0, 64, 65, 73, 81, 97)]
    [64, 64, 72, 80, 96, 128]
    """
    step = math.ceil(math.sqrt(batch_size))
    excess = tf.maximum(tf.cast(count, tf.int32) - batch_size, 0)
    sizes = step * 2 ** tf.range(0, 27 - step.bit_length())
    sizes = tf.concat([[0], sizes], axis=0)
    return batch_size + sizes[tf.searchsorted(sizes, excess[None])[0]]
