"""IMDB reviews: is a film liked? Logistic regression on bags of words, at one privacy budget.

    python examples/imdb.py                         # Keras downloads the reviews
    python examples/imdb.py --data imdb.npz         # a file in the format of dp2_keras/data/imdb_reviews.py
    python examples/imdb.py --features counts       # skewed features, where scales matter
    python examples/imdb.py --optimizer DP2RMSprop  # the paper's own, which has more to choose

The rows stay sparse: 10,000 words, of which a review has a hundred.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np

import dp2_keras as dp2
from dp2_keras import data

# Short rows need long weights, which cost noise; see docs/recipes.md.
TIMES = {"binary": 1, "counts": 1, "frequencies": 80, "tfidf": 5}
OPTIMIZERS = ("DP2NoiseFloor", "DP2RMSprop", "DPRMSprop", "DPSGD")


def optimizer(name: str, delay: int):
    """The recommended one, the paper's, or a baseline; the noise is what the budget asks for."""
    if name == "DP2NoiseFloor":
        return dp2.DP2NoiseFloor()
    if name == "DPSGD":
        return dp2.DPSGD(learning_rate=2.0, l2_norm_clip=0.5, noise_multiplier="auto")
    if name == "DPRMSprop":
        return dp2.DPRMSprop(learning_rate=0.005, l2_norm_clip=0.5, noise_multiplier="auto", eps=1e-3)
    return dp2.DP2RMSprop(
        learning_rate=3.0,
        l2_norm_clip=5.0,
        sgd_learning_rate=1.0,
        sgd_l2_norm_clip=0.5,
        noise_multiplier="auto",
        delay=delay,
        eps=1e-4,
    )


def build(features: int) -> keras.Model:
    """Logistic regression on sparse rows, as Keras has it."""
    inputs = keras.Input((features,), sparse=True)
    return keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="zeros")(inputs))


def accuracy(model: keras.Model, x, y: np.ndarray) -> float:
    """Of a linear model, without making the rows dense."""
    kernel, bias = model.get_weights()
    return float(np.mean(((x @ kernel + bias)[:, 0] > 0) == y))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="imdb.npz; without it Keras's own copy is downloaded")
    parser.add_argument("--features", choices=TIMES, default="binary")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=60)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Trains, and prints what was learnt and what it cost."""
    args = parse(argv)
    (x, y), (x_test, y_test) = data.imdb(args.data, features=args.features)
    times = TIMES[args.features] if args.optimizer == "DP2NoiseFloor" else 1
    x, x_test = times * x, times * x_test
    steps_per_epoch = len(y) // args.batch_size
    model = dp2.make_private(build(x.shape[1]))
    model.compile(
        optimizer(args.optimizer, delay=max(1, 5 * steps_per_epoch)),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    budget = dp2.PrivacyBudget(args.epsilon, args.delta)
    model.fit(x, y, batch_size=args.batch_size, epochs=args.epochs, callbacks=[budget], verbose=2)
    print(f"{args.optimizer}: test accuracy {accuracy(model, x_test, y_test):.3f}, majority class 0.500")
    print(model.privacy_statement(args.delta))


if __name__ == "__main__":
    main()
