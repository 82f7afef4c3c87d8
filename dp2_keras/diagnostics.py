"""What a private step looks like from inside, for the fit log.

    phase             the share of adaptive steps
    clipped_fraction  the share of examples with ||S g_i|| > C
    scaled_norm       the mean of ||S g_i||

In the pilot of `DP2NoiseFloor` norms and C are those of squares.

Exact functions of the private data, like every training metric: epsilon does not cover
them. Switch them off with `compile(diagnostics=False)` where the log is published.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dp2_keras.variables import own_variable

_NAMES = ("phase", "clipped_fraction", "scaled_norm")

# Bins of norms for quantiles: eight to an octave, from 2^-40 to 2^40.
_OCTAVES, _BINS_PER_OCTAVE = 40, 8


class Diagnostics:
    """Means over an epoch. Not tracked by the model, so that validation has none.

    Args:
        keep_norms: count the norms too, for their quantiles.
    """

    def __init__(self, keep_norms: bool = False):
        self.keeps_norms = keep_norms
        bins = 2 * _OCTAVES * _BINS_PER_OCTAVE + 1
        self._counts = own_variable(np.zeros([bins]), tf.int64) if keep_norms else None
        # One variable for all: a step of a small model is as slow as it has operations.
        self._sums = own_variable(np.zeros([2, len(_NAMES)]), tf.float32)

    def update(self, phase, norms, l2_norm_clip):
        """Adds one step: its phase, its examples' norms and the clip norm."""
        clipped = tf.math.count_nonzero(norms > tf.cast(l2_norm_clip, norms.dtype), dtype=tf.float32)
        examples = tf.cast(tf.size(norms), tf.float32)
        self._sums.assign_add([[phase, clipped, tf.reduce_sum(norms)], [1.0, examples, examples]])
        if self.keeps_norms:
            self._counts.assign_add(
                tf.math.bincount(_bins(norms), minlength=self._counts.shape[0], dtype=tf.int64)
            )

    def result(self):
        """The means so far, by name."""
        sums, counts = tf.unstack(self._sums)
        return dict(zip(_NAMES, tf.unstack(tf.math.divide_no_nan(sums, counts))))

    def quantiles(self, fractions: Sequence[float]) -> list[float]:
        """Quantiles of the epoch's norms, to half a bin, 5 %; none without norms."""
        counts = np.cumsum(self._counts.numpy()) if self.keeps_norms else np.zeros(1)
        if not counts[-1]:
            return []
        bins = np.searchsorted(counts, np.asarray(fractions) * counts[-1])
        return list(2.0 ** (bins / _BINS_PER_OCTAVE - _OCTAVES))

    def reset(self):
        """Starts an epoch."""
        self._sums.assign(tf.zeros_like(self._sums))
        if self.keeps_norms:
            self._counts.assign(tf.zeros_like(self._counts))


def _bins(norms):
    """The bin of each norm, the nearest power of 2^(1/8)."""
    octaves = tf.math.log(tf.maximum(norms, 2.0**-_OCTAVES)) / np.log(2.0)
    bins = tf.round((octaves + _OCTAVES) * _BINS_PER_OCTAVE)
    return tf.cast(tf.clip_by_value(bins, 0, 2 * _OCTAVES * _BINS_PER_OCTAVE), tf.int32)
