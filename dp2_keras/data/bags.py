"""Bags of words: rows of word numbers as a sparse matrix with one column per word.

    counts[i, j]  = how often word j is in row i
    binary        = 1 where counts > 0
    frequencies   = counts / sum of the row
    tfidf         = counts * idf, each row divided by its l2 norm
    idf[j]        = 1 + log((1 + n) / (1 + df[j])),  df[j] = number of the n rows with word j

An empty row is zero in all of them.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse


def count(indptr: np.ndarray, indices: np.ndarray, num_words: int, first: int = 0):
    """Counts the words of each row: `indices[indptr[i]:indptr[i + 1]]` is row i.

    Numbers below `first` and from `num_words` on are left out.

    Returns:
        A SciPy CSR matrix, float32 [rows, num_words], with sorted columns.
    """
    kept = (indices >= first) & (indices < num_words)
    ends = np.concatenate([[0], np.cumsum(kept)])[indptr]
    values = np.ones(ends[-1], np.float32)
    shape = (len(indptr) - 1, num_words)
    matrix = scipy.sparse.csr_matrix((values, indices[kept].astype(np.int32), ends), shape=shape)
    matrix.sum_duplicates()
    return matrix


def binary(counts):
    """One where a word is present."""
    return _with_values(counts, np.ones_like(counts.data))


def frequencies(counts):
    """The share of each word in its row."""
    return _divided(counts, np.asarray(counts.sum(axis=1, dtype=np.float64)).ravel())


FEATURES = {"binary": binary, "counts": lambda counts: counts, "frequencies": frequencies}


def tfidf(counts, idf: np.ndarray):
    """Counts weighted by word, in rows of l2 norm 1."""
    weighted = _with_values(counts, (counts.data * np.asarray(idf)[counts.indices]).astype(np.float32))
    squares = weighted.multiply(weighted).sum(axis=1, dtype=np.float64)
    return _divided(weighted, np.sqrt(np.asarray(squares)).ravel())


def inverse_document_frequencies(counts) -> np.ndarray:
    """The weights of `tfidf` from the rows themselves: float32 [num_words]."""
    rows, num_words = counts.shape
    documents = np.bincount(counts.indices, minlength=num_words)
    return (1.0 + np.log((1.0 + rows) / (1.0 + documents))).astype(np.float32)


def _divided(matrix, divisors):
    each = np.repeat(divisors, np.diff(matrix.indptr))
    return _with_values(matrix, (matrix.data / np.where(each == 0.0, 1.0, each)).astype(np.float32))


def _with_values(matrix, values):
    return scipy.sparse.csr_matrix((values, matrix.indices, matrix.indptr), shape=matrix.shape)
