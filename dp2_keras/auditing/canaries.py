"""Canaries: examples whose part in training can be told from what it releases, if anything can.

A canary of the worst case pulls at a weight of its own and at nothing else:

    loss_i = pull * k_i,        g_i = pull e_i,        clip(S g_i, C) = C e_i

whatever the scale S, and no other example has a gradient there. Where a step asks for squares it is the
same, with their clip norm for C. So a step whose noisy sum, in units of C, is

    z_i = [i in the batch] + sigma N(0, 1)

says of canary i, in a Poisson sample of rate q, and over all steps of a kind

    score_i = sum_t ln( 1 - q + q exp((2 z_it - 1) / (2 sigma^2)) )

which is the logarithm of the likelihood ratio: by Neyman and Pearson no score tells more. Canaries do not
meet, so that each of them is a trial of its own. A canary that is left out stays in the data with weight 0,
for n is public.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.model import unwrap
from dp2_keras.schedule import Phase

keras = _keras.keras

_KINDS = len(Phase) + 1
_PULL = 1e6  # Times C: far above any clip norm. Its square, and the norm of a pilot's squares, are float32.


def pull_at_own_weight(y_true, y_pred):
    """A canary's loss: what the model puts out for it, which is its pull times its weight."""
    del y_true
    return y_pred[:, 0]


def with_canaries(model, count: int):
    """A copy of a model, with a second output that has a weight for each canary.

    Args:
        model: a functional or Sequential model.
        count: how many canaries.

    Returns:
        The model, and the layer that holds the weights.

    Raises:
        ValueError: if the model's inputs are not known.
    """
    if not getattr(model, "inputs", None) or len(model.outputs) != 1:
        raise ValueError(
            "The worst case is audited on a functional or Sequential model with one output and known inputs. "
            f'Audit this {type(model).__name__} with `kind="examples"`.'
        )
    copy = keras.models.clone_model(unwrap(model))
    inputs = [keras.Input(t.shape[1:], dtype=t.dtype) for t in copy.inputs]
    number, pull = keras.Input((1,), dtype="int32"), keras.Input((1,))
    weights = keras.layers.Embedding(count, 1, embeddings_initializer="zeros", name="canaries")
    pulled = keras.layers.Multiply()([keras.layers.Flatten()(weights(number)), pull])
    return keras.Model(
        [*inputs, number, pull], [copy(inputs if len(inputs) > 1 else inputs[0]), pulled]
    ), weights


def rows(x, y, included: np.ndarray, l2_norm_clip: float):
    """The data of the audited model: ordinary examples, then the canaries, copies of the first example.

    Args:
        x: inputs: an array, or a tuple or list of them.
        y: labels.
        included: for each canary whether it is in.
        l2_norm_clip: C.

    Returns:
        x, y and sample_weight for `fit`.
    """
    count, ordinary = len(included), len(y)
    columns = [_extended(column, count) for column in (x if isinstance(x, (tuple, list)) else [x])]
    numbers = np.concatenate([np.zeros(ordinary, np.int32), np.arange(count, dtype=np.int32)])
    pulls = np.concatenate([np.zeros(ordinary), np.full(count, _PULL * l2_norm_clip)]).astype(np.float32)
    weights = np.concatenate([np.ones(ordinary), np.zeros(count)]).astype(np.float32)
    own = np.concatenate([np.zeros(ordinary), included]).astype(np.float32)
    labels = [_extended(y, count), np.zeros([ordinary + count, 1], np.float32)]
    return [*columns, numbers[:, None], pulls[:, None]], labels, [weights, own]


def public_rows(data):
    """The public data of the audited model: ordinary examples, and no canary.

    Args:
        data: (x, y) or (x, y, sample_weight).

    Returns:
        x, y and sample_weight for `compile`.
    """
    x, y, *weights = data
    x, y, (ones, none) = rows(x, y, np.zeros(0, bool), l2_norm_clip=0.0)
    return x, y, [*(weights or [ones]), none]


def _extended(column, count):
    column = np.asarray(column)
    return np.concatenate([column, np.repeat(column[:1], count, axis=0)])


def listening(optimizer, sampling_rate: float):
    """The same optimizer, new, that also adds up the scores at the top of this file, kind by kind.

    The kinds of a step are the phases, and a pilot's squares.

    Args:
        optimizer: whose config it has.
        sampling_rate: q.

    Returns:
        An instance of a subclass, with an attribute `scores`, a variable [3, canaries] after `listen_to`.
    """

    class Listening(type(optimizer)):
        def listen_to(self, weights):
            self.heard = weights
            with tf.init_scope():
                self.scores = tf.Variable(tf.zeros([_KINDS, weights.shape[0]]), trainable=False)

        def largest_clip(self):
            return max(self._clip(phase) for phase in Phase)

        def finish_step(self, clipped, regularization=None):
            query = clipped.parts()[-1].query
            self.unit = query.sensitivity
            self.kind = tf.where(query.is_squared, float(len(Phase)), self.phase())
            super().finish_step(clipped, regularization)

        def _directions(self, variables, *releases):
            (mean,) = [g for g, v in zip(releases[-1], variables) if v is self.heard]
            z = mean[:, 0] * self._batch_size / self.unit
            evidence = _log_mixture(sampling_rate, (2.0 * z - 1.0) / (2.0 * self.sigma**2))
            kind = tf.one_hot(tf.cast(self.kind, tf.int32), _KINDS)
            self.scores.assign_add(kind[:, None] * evidence)
            return super()._directions(variables, *releases)

    Listening.__name__ = type(optimizer).__name__
    clip = {"l2_norm_clip": optimizer.l2_norm_clip}  # The one in force: canaries have a loss of their own.
    return Listening.from_config({**optimizer.get_config(), **clip})


def _log_mixture(rate, exponent):
    """ln(1 - q + q e^x), whatever the size of x."""
    if rate == 1:
        return exponent
    return math.log1p(-rate) + tf.nn.softplus(exponent + math.log(rate / (1.0 - rate)))
