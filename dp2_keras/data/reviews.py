"""Synthetic reviews: bags of words whose rare words say most about the label.

A review of label y = -1 or +1 has 1 + Poisson(Gamma) words, 151 on average, each drawn by

    P(word j | y)  proportional to  f_j exp(y b_j)

    common words, the first 100 :  f_j = 0.96 zipf_j,  b_j = +0.15 or -0.15 by a coin
    content words, all others   :  f_j = 0.04 zipf_j,  b_j = +0.9 or -0.9 by a coin

with zipf_j = 1 / (4 + j), normalised over the words of its kind. The features are the
multi-hot vector of a review's words.

As in text, a few common words fill most of a review and only hint at its label, while
thousands of rare ones decide it. So a gradient is mostly common words, and a method that
scales every coordinate alike spends its clip norm on them.
"""

from __future__ import annotations

import numpy as np

from dp2_keras import _checks

_COMMON_WORDS = 100
_COMMON_EFFECT = 0.15
_CONTENT_SHARE = 0.04
_CONTENT_EFFECT = 0.9
_MEAN_LENGTH = 150
_LENGTH_SHAPE = 3.0  # Of the Gamma distribution: lengths vary by about 60%.


def synthetic_reviews(
    num_train: int = 12_000, num_test: int = 4_000, vocabulary_size: int = 4_000, seed: int = 0
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Draws labelled bags of words, shaped like IMDB; the equation at the top of this file.

    Args:
        num_train: number of training reviews, at least 1.
        num_test: number of test reviews, at least 1.
        vocabulary_size: number of words, more than 100, of which 100 are common.
        seed: integer of at least 0; the same seed gives the same data.

    Returns:
        `(x_train, y_train), (x_test, y_test)`, as `keras.datasets` has it: x float32
        [n, vocabulary_size] of zeros and ones, y float32 [n] of zeros and ones, in each
        part as many ones as zeros (one more zero if n is odd).

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> (x_train, y_train), (x_test, y_test) = synthetic_reviews(100, 20, vocabulary_size=500)
    >>> x_train.shape, x_test.shape, float(y_train.mean())
    ((100, 500), (20, 500), 0.5)
    """
    _checks.positive_integer(num_train=num_train, num_test=num_test, vocabulary_size=vocabulary_size)
    if vocabulary_size <= _COMMON_WORDS:
        _checks.fail(f"more than {_COMMON_WORDS}", vocabulary_size=vocabulary_size)
    rng = np.random.default_rng(seed)
    words = _word_probabilities(rng, vocabulary_size)
    return _reviews(rng, words, num_train), _reviews(rng, words, num_test)


def _word_probabilities(rng, vocabulary_size):
    """P(word | y) for y = -1 and y = +1: float64 [2, vocabulary_size]."""
    ranks = np.arange(1, vocabulary_size + 1)
    common, zipf = ranks <= _COMMON_WORDS, 1.0 / (4.0 + ranks)
    share = np.where(common, 1.0 - _CONTENT_SHARE, _CONTENT_SHARE)
    frequencies = share * zipf / np.where(common, zipf[common].sum(), zipf[~common].sum())
    effects = np.where(common, _COMMON_EFFECT, _CONTENT_EFFECT) * rng.choice([-1.0, 1.0], vocabulary_size)
    weights = frequencies * np.exp(np.outer([-1.0, 1.0], effects))
    return weights / weights.sum(axis=1, keepdims=True)


def _reviews(rng, words, count):
    """Multi-hot features and balanced labels of `count` reviews."""
    y = rng.permutation(np.arange(count) % 2)
    lengths = 1 + rng.poisson(rng.gamma(_LENGTH_SHAPE, _MEAN_LENGTH / _LENGTH_SHAPE, count))
    x = np.zeros((count, words.shape[1]), np.float32)
    for label in (0, 1):
        rows = np.repeat(np.flatnonzero(y == label), lengths[y == label])
        x[rows, rng.choice(words.shape[1], rows.size, p=words[label])] = 1.0
    return x, y.astype(np.float32)
