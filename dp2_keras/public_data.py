"""Public data beside private data: rows that anybody may see, and the gradients of the loss on them.

    batch : k of the n public rows, each uniform, drawn anew in every step; all of them where k = n
    mean  : 1/k sum_j g_j          each: g_1 ... g_k,          g_j the gradient of row j's own loss

For methods that get the geometry of the gradients from public data (arXiv:2212.00309, Appendix "Additional
Results for Comparison with Public Data-Assisted Methods"). The private batch and the public one never meet: a
public gradient is a function of public rows and of the weights, which are released anyway, so that it costs
nothing. That the rows hold nothing of the protected examples is the user's word, which the privacy statement
repeats. They are held by the model, and are in none of its files.

A public row whose gradient is not finite counts as zero, and so does a mean whose square is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dp2_keras import _checks
from dp2_keras.privatizer import as_column, compute_dtype, squared_norms
from dp2_keras.rows import Rows, is_arrays

DEFAULT_BATCH_SIZE = 64

NOT_LOADED = object()  # In the place of public data, for a model that comes from a file.


class PublicData:
    """The public rows of a model, and how many of them a step draws.

    Args:
        data: (x,), (x, y) or (x, y, sample_weight): arrays, as for `fit`.
        batch_size: k, at most the number of rows n. Defaults to 64, or n if that is less.
        keeps_sparse: whether batches of sparse rows are sparse tensors.

    Raises:
        ValueError: if the data is not arrays of one length, or `batch_size` is out of range.

    Example:
    >>> import numpy as np
    >>> public = PublicData((np.eye(100), np.ones(100)), batch_size=8)
    >>> x, y = public.batch(lambda shape: tf.zeros(shape, tf.uint32))
    >>> x.shape, y.shape
    (TensorShape([8, 100]), TensorShape([8]))
    """

    def __init__(self, data: Sequence, batch_size: int | None = None, *, keeps_sparse: bool = False):
        if not isinstance(data, (tuple, list)) or not is_arrays(data):
            raise ValueError(
                "`public_data` must be (x, y) or (x, y, sample_weight), arrays as for `fit`. Received: "
                f"{type(data).__name__}"
            )
        rows = Rows.of(data, keeps_sparse=keeps_sparse)
        if batch_size is None:
            batch_size = min(len(rows), DEFAULT_BATCH_SIZE)
        _checks.positive_integer(public_batch_size=batch_size)
        if batch_size > len(rows):
            _checks.fail(f"at most the {len(rows)} rows of `public_data`", public_batch_size=batch_size)
        self.data, self.batch_size = data, batch_size
        self._row_count, self._take = len(rows), rows.taker()

    def batch(self, random_bits: Callable) -> Any:
        """Draws the batch of a step.

        Args:
            random_bits: gives uint32 words of a shape.

        Returns:
            The rows drawn, in the structure of the data.
        """
        if self.batch_size == self._row_count:
            return self._take(tf.range(self._row_count, dtype=tf.int64))
        return self._take(tf.cast(random_bits([self.batch_size]), tf.int64) % self._row_count)


@dataclasses.dataclass(frozen=True, eq=False)
class PublicGradients:
    """Gradients on a batch of public rows: what an optimizer that needs public data gets in `begin_step`.

    Attributes:
        values: one tensor per variable: the mean, or, of shape [k, *variable], the gradient of each row.
    """

    values: Sequence[tf.Tensor]

    @classmethod
    def mean_of(cls, sums: Sequence[tf.Tensor], count: int) -> PublicGradients:
        """The mean, of the sum over `count` rows."""
        means = [total / count for total in sums]
        is_finite = tf.math.is_finite(tf.add_n([tf.reduce_sum(tf.square(m)) for m in map(_single, means)]))
        return cls([tf.where(is_finite, mean, tf.zeros_like(mean)) for mean in means])

    @classmethod
    def of_each(cls, gradients: Sequence[tf.Tensor]) -> PublicGradients:
        """The gradients of single rows."""
        gradients = [tf.cast(g, compute_dtype(g.dtype)) for g in gradients]
        squared = tf.add_n([squared_norms(g) for g in gradients])
        is_finite = tf.math.is_finite(tf.cast(squared, tf.float32))
        keep = lambda g: tf.where(as_column(is_finite, g.shape.rank), g, tf.zeros_like(g))  # noqa: E731
        return cls([keep(g) for g in gradients])


def _single(tensor):
    return tf.cast(tensor, tf.float32)  # Whatever the weights are, a second moment may be no larger.


def held_for(optimizer, data, batch_size, *, keeps_sparse: bool = False) -> PublicData | None:
    """The public data of a model that is compiled with this optimizer.

    Args:
        optimizer: a `PrivateOptimizer`.
        data, batch_size: what `compile` was given; `NOT_LOADED` leaves the error to the first step.
        keeps_sparse: see `PublicData`.

    Returns:
        The data, or None for an optimizer that needs none.

    Raises:
        ValueError: if the optimizer needs public data and there is none, or the other way round.
    """
    if data is NOT_LOADED:
        return None
    name, needed = type(optimizer).__name__, optimizer.public_gradients is not None
    if needed and data is None:
        raise ValueError(f"{MISSING.format(optimizer=name)} Received: public_data=None")
    if not needed and (data is not None or batch_size is not None):
        raise ValueError(
            f"`public_data` and `public_batch_size` must be left out with this {name}, which would not look "
            "at them; AdaDPSRMSprop and PDADPMD use public data. Received: public_data of type "
            f"{type(data).__name__}, public_batch_size={batch_size}"
        )
    return PublicData(data, batch_size, keeps_sparse=keeps_sparse) if needed else None


MISSING = (
    "{optimizer} needs public data: `model.compile(optimizer, loss, public_data=(x, y))` on a private model, "
    "with rows that hold nothing of the protected examples. No file has them: compile a loaded model again."
)
