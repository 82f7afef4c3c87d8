"""Where the examples' gradients have their length: a look that is taken before the weights move.

    h_i  = (S g_i)^2                                                   element by element
    e    = ( sum_i h_i min(1, C_p / ||h_i||) + N(0, (sigma C_p)^2 I) ) / B,   mean over the steps of a round
    nu_p = sigma C_p / (B sqrt(steps of a round))                      the deviation of the noise in it
    a    = max(e - 2 nu_p, 0)                                          what stands out of it
    f    = (1 + a / nu_p)^(-1/4)
    S   <- S f sqrt(k),   k^2 = sum a / sum a f^2                      after each of 3 rounds; 1 at first
    R    = min(1, S / geometric mean of S over the weights of a variable)

The clip cuts an example's gradient to one length, and coordinates that are long in every example take it
away from all others. How long they are is not seen in the mean of the gradients, which is what
preconditioners are made of: what is long and points anywhere has a mean of nothing. It is seen in the mean
of their squares, and in few steps, because squares do not cancel. Each round looks through the scale of the
round before, in which what is long hides less of the rest. k is by how much f has shortened the examples;
half of it, in logarithms, is made up for, so that examples shorter than the clip norm keep some of their
length.

Gradients times S are clipped, and what they add up to moves the weights times R. Where S is below its mean
that is a change of variables. So a weight whose input is long has less noise, as it should: all of it is
multiplied by that input. None has more: an input that was rare here may not be elsewhere.

The squares are clipped and noised like gradients, with the same sigma: a step of the pilot costs what any
step costs. C_p = C^2 / 100 is so small that examples longer than C, but for those spread over very many
coordinates, are cut to it: it is shares of a length that are added up. Not in arXiv:2212.00309, whose
preconditioner is the square of a mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

ROUNDS = 3
_LEAST_STEPS = 4  # Of a round: of 160 steps in all, three cost more than they found (docs/recipes.md).
_CLIP = 0.01
_THRESHOLD = 2.0
_POWER = 0.5


def pilot_steps(steps: int | None, share: float) -> int:
    """How many of some steps are the pilot's: all rounds alike, and none where a round would be too short.

    Args:
        steps: of the fit; None if nobody knows.
        share: of them, at most.

    Example:
    >>> pilot_steps(720, 0.025), pilot_steps(100, 0.025), pilot_steps(None, 0.025)
    (18, 0, 0)
    """
    of_round = int(share * (steps or 0) / ROUNDS)
    return ROUNDS * of_round if of_round >= _LEAST_STEPS else 0


def is_too_small(l2_norm_clip: float) -> bool:
    """Whether squares of C_p would be near the smallest float32, and vanish from norms."""
    return l2_norm_clip < 1e-5


def squares_clip(l2_norm_clip: float) -> float:
    """C_p, for gradients that are clipped to C."""
    return _CLIP * l2_norm_clip**2


def log_changes(energies: Sequence[tf.Tensor], noise: tf.Tensor | float) -> list[tf.Tensor]:
    """log(f sqrt(k)), by which a round changes log S.

    Args:
        energies: e, one tensor for each variable.
        noise: nu_p.

    Example:
    >>> (change,) = log_changes([tf.constant([17.0, 0.0, 2.0])], noise=1.0)
    >>> tf.exp(change).numpy().round(3)  # f is 1/2, 1, 1, and k is 2.
    array([0.707, 1.414, 1.414], dtype=float32)
    """
    above = [tf.maximum(e - tf.cast(_THRESHOLD * noise, e.dtype), 0.0) for e in energies]
    logs = [-_POWER / 2.0 * tf.math.log1p(a / tf.cast(noise, a.dtype)) for a in above]
    before = _sum(above)
    after = _sum([a * tf.exp(2.0 * log) for a, log in zip(above, logs)])
    made_up = tf.where(before > 0.0, 0.25 * tf.math.log(before / after), 0.0)
    return [log + tf.cast(made_up, log.dtype) for log in logs]


def stretch(log_scale: tf.Tensor) -> tf.Tensor:
    """R, what a scale takes from the longer inputs of a variable.

    Args:
        log_scale: log S, of one variable.

    Returns:
        A tensor of its shape, of numbers up to 1.

    Example:
    >>> stretch(tf.math.log([1.0, 4.0])).numpy().round(3)
    array([0.5, 1. ], dtype=float32)
    """
    return tf.exp(tf.minimum(log_scale - tf.reduce_mean(log_scale), 0.0))


def _sum(tensors):
    return tf.add_n([tf.cast(tf.reduce_sum(t), tf.float32) for t in tensors])
