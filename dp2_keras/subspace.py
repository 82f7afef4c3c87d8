"""Projection on the directions in which public gradients vary most, without a d x d matrix.

    M = 1/k' A^T A,   the rows of A [k', d] being k' gradients over all variables
    P s = sum_{j <= k} v_j (v_j . s),   v_j the eigenvectors of the k largest eigenvalues of M

M is that of arXiv:2212.00309, Appendix "Additional Results for Comparison with Public Data-Assisted Methods"
(after Zhou et al., arXiv:2007.03813), whose d x d eigenproblem was too dear there. Its eigenvectors come from
those of the Gram matrix, which is k' x k':

    A A^T u_j = lambda_j u_j,   v_j = A^T u_j / sqrt(lambda_j)
    P s = A^T U diag(1 / lambda) U^T A s

Directions that the gradients do not have, to rounding, are left out: P is then of less than k dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_LEAST = 1e-6  # Of the largest eigenvalue: what float32 leaves of the others.


def project(tensors: Sequence[tf.Tensor], rows: Sequence[tf.Tensor], dimensions: int) -> list[tf.Tensor]:
    """Projects a vector on the top eigenspace of the second moment of some others.

    Args:
        tensors: the vector: one tensor per variable.
        rows: the others: per variable a tensor [k', *variable], all of them finite.
        dimensions: k, at least 1 and at most k'.

    Returns:
        Tensors like `tensors`.

    Example:
    >>> rows = [tf.constant([[3.0, 0.0], [0.0, 2.0]]), tf.constant([[0.0], [0.0]])]
    >>> [t.numpy().tolist() for t in project([tf.constant([5.0, 6.0]), tf.constant([7.0])], rows, 1)]
    [[5.0, 0.0], [0.0]]
    """
    flat = [tf.cast(tf.reshape(r, [r.shape[0], -1]), t.dtype) for r, t in zip(rows, tensors)]
    inverse = _gram_inverse(_summed([tf.matmul(a, a, transpose_b=True) for a in flat]), dimensions)
    products = _summed([tf.linalg.matvec(a, tf.reshape(t, [-1])) for a, t in zip(flat, tensors)])
    weights = tf.linalg.matvec(inverse, products)
    parts = [tf.linalg.matvec(a, tf.cast(weights, a.dtype), transpose_a=True) for a in flat]
    return [tf.reshape(part, tf.shape(t)) for part, t in zip(parts, tensors)]


def _summed(tensors):
    return tf.add_n([tf.cast(t, tf.float64) for t in tensors])


def _gram_inverse(gram, dimensions):
    """U diag(1 / lambda) U^T, of the largest eigenvalues."""
    values, vectors = tf.linalg.eigh(gram)  # In ascending order.
    values, vectors = values[-dimensions:], vectors[:, -dimensions:]
    is_there = values > _LEAST * values[-1]
    inverse = tf.where(
        is_there, 1.0 / tf.where(is_there, values, tf.ones_like(values)), tf.zeros_like(values)
    )
    return tf.matmul(vectors * inverse, vectors, transpose_b=True)
