"""Stack Overflow: which tag has this sentence's question? Softmax regression, at one privacy budget.

    python examples/prepare_stackoverflow.py stackoverflow.npz      # once, on the classic stack
    python examples/stackoverflow.py --data stackoverflow.npz

10,000 words and 500 tags are 5 million weights; no gradient of a single sentence is ever made.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np

import dp2_keras as dp2
from dp2_keras import data


def build(words: int, tags: int) -> keras.Model:
    """Softmax regression on sparse rows."""
    inputs = keras.Input((words,), sparse=True)
    return keras.Model(inputs, keras.layers.Dense(tags, kernel_initializer="zeros")(inputs))


def accuracy(model: keras.Model, x, y: np.ndarray) -> float:
    """Of a linear model, without making the rows dense."""
    kernel, bias = model.get_weights()
    guesses = [(x[k : k + 10_000] @ kernel + bias).argmax(axis=1) for k in range(0, len(y), 10_000)]
    return float(np.mean(np.concatenate(guesses) == y))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="a file of examples/prepare_stackoverflow.py")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=10)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Trains, and prints what was learnt and what it cost."""
    args = parse(argv)
    description = data.stackoverflow_description(args.data)
    (x, y), (x_test, y_test) = data.stackoverflow(args.data)
    print(f"{len(y):,} sentences of {description.get('source', 'Stack Overflow')}")
    model = dp2.make_private(build(x.shape[1], len(description["tags"])))
    model.compile(dp2.DP2NoiseFloor(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    budget = dp2.PrivacyBudget(args.epsilon, args.delta)
    model.fit(x, y, batch_size=args.batch_size, epochs=args.epochs, callbacks=[budget], verbose=2)
    trivial = np.mean(y_test == np.bincount(y).argmax())
    print(f"test accuracy {accuracy(model, x_test, y_test):.3f}, most frequent tag {trivial:.3f}")
    print(model.privacy_statement(args.delta))


if __name__ == "__main__":
    main()
