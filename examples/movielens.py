"""MovieLens-100k: how many stars? User and item biases, and perhaps factors, at one privacy budget.

    python examples/movielens.py                        # GroupLens's archive is downloaded
    python examples/movielens.py --data ml-100k         # a directory with u.data
    python examples/movielens.py --factors 8

Epsilon protects a rating, as in the paper, not all ratings of a user. Ratings are centred on 3.5, a public
number: the mean of the data would have to be paid for. Centred ones have a deviation of about 1, which is
what the optimizer's clip norm for squared errors is made for.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np

import dp2_keras as dp2
from dp2_keras import data

USERS, ITEMS = 943, 1682
CENTRE = 3.5


def build(factors: int) -> keras.Model:
    """rating - 3.5 = bias of the user + bias of the item (+ the product of their factors)."""
    inputs = [keras.Input((1,), dtype="int32"), keras.Input((1,), dtype="int32")]
    parts = [rows(x, count, 1, deviation=0.0) for x, count in zip(inputs, (USERS, ITEMS))]
    if factors:
        vectors = [rows(x, count, factors, deviation=0.1) for x, count in zip(inputs, (USERS, ITEMS))]
        parts.append(keras.layers.Dot(axes=-1)(vectors))
    return keras.Model(inputs, keras.layers.Add()(parts))


def rows(inputs, count: int, width: int, deviation: float):
    """A row of a table for each number."""
    start = keras.initializers.RandomNormal(stddev=deviation)
    return keras.layers.Flatten()(keras.layers.Embedding(count, width, embeddings_initializer=start)(inputs))


def columns(part) -> tuple:
    """Inputs and centred ratings as Keras wants them."""
    (users, items), ratings = part
    return (users[:, None], items[:, None]), ratings - CENTRE


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="u.data or its directory; without it the archive is downloaded")
    parser.add_argument("--factors", type=int, default=0)
    parser.add_argument("--epsilon", type=float, default=11.05)
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--batch-size", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=20)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Trains, and prints what was learnt and what it cost."""
    args = parse(argv)
    (x, y), (x_test, y_test) = map(columns, data.movielens(args.data))
    model = dp2.make_private(build(args.factors))
    model.compile(dp2.DP2NoiseFloor(), loss="mse")
    budget = dp2.PrivacyBudget(args.epsilon, args.delta)
    model.fit(x, y, batch_size=args.batch_size, epochs=args.epochs, callbacks=[budget], verbose=2)
    guesses = model.predict(x_test, batch_size=10_000, verbose=0)[:, 0]
    trivial = np.mean((y.mean() - y_test) ** 2)
    print(f"test MSE {np.mean((guesses - y_test) ** 2):.3f}, mean rating {trivial:.3f}")
    print(model.privacy_statement(args.delta))


if __name__ == "__main__":
    main()
