"""The models: linear ones on rows, a small network, and factors of a matrix of ratings.

linear     z = a W + b,                     W = 0, b = 0 at the start
network    z = tanh(a W + b) V + c,         W and V as Keras starts them
factors    p = u . i,                       entries truncated normal of deviation 1, as in the authors' code
biases     p - 3.5 = b_u + b_i (+ u . i),   biases zero at the start; 3.5 is a public constant
"""

from __future__ import annotations

import random

import keras

USERS, ITEMS = 944, 1683  # One more than there are, as in the authors' code.
CENTRE = 3.5


def linear(features: int, outputs: int, sparse: bool = True) -> keras.Model:
    """Logits of rows, sparse ones or not."""
    inputs = keras.Input((features,), sparse=sparse)
    return keras.Model(inputs, keras.layers.Dense(outputs, kernel_initializer="zeros")(inputs))


def network(features: int, hidden: int, outputs: int) -> keras.Model:
    """Logits by one hidden layer; tanh, whose gradients are bounded."""
    inputs = keras.Input((features,))
    found = keras.layers.Dense(hidden, activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(outputs)(found))


def factors(rank: int = 100) -> keras.Model:
    """The paper's matrix factorisation."""
    return _ratings(lambda users, items: _product(users, items, rank, deviation=1.0))


def biases(rank: int = 0, deviation: float = 0.1) -> keras.Model:
    """Ratings less `CENTRE`: what users and items deviate, and perhaps factors of small entries."""

    def rating(users, items):
        parts = [_embedding(users, USERS, 1, "zeros"), _embedding(items, ITEMS, 1, "zeros")]
        return keras.layers.Add()(parts + ([_product(users, items, rank, deviation)] if rank else []))

    return _ratings(rating)


def _ratings(rating):
    inputs = [keras.Input((1,), dtype="int32"), keras.Input((1,), dtype="int32")]
    return keras.Model(inputs, rating(*inputs))


def _product(users, items, rank, deviation):
    vectors = [
        _embedding(inputs, rows, rank, keras.initializers.TruncatedNormal(stddev=deviation, seed=seed))
        for inputs, rows, seed in zip((users, items), (USERS, ITEMS), _seeds())
    ]
    return keras.layers.Dot(axes=-1)(vectors)


def _seeds():
    """Two of the global generator's, so that a run's seed decides the factors."""
    return random.randrange(2**31), random.randrange(2**31)


def _embedding(inputs, rows, rank, start):
    """The row of each number: [n, rank]."""
    return keras.layers.Flatten()(keras.layers.Embedding(rows, rank, embeddings_initializer=start)(inputs))
