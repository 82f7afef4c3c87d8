"""The same privacy budget, three private optimizers, one table.

Logistic regression on synthetic reviews, where common words fill the gradient and rare
words decide the label: data made to need adaptivity; elsewhere the order may differ. Every
method takes equally many Poisson-sampled steps with the same noise multiplier, and so has
the same epsilon; they differ in accuracy.

    python examples/demo.py                  # the same table every time
    python examples/demo.py --secret         # noise from the operating system
"""

from __future__ import annotations

import argparse
import time

import keras
import numpy as np
from matplotlib.figure import Figure

import dp2_keras as dp2
from dp2_keras import data


def optimizers(delay: int, **shared) -> list:
    """The methods, each at the best of 12 settings, tried on another draw of the data.

    DPSGD       rate 0.5, 1, 2, 4, 8, 16;                    clip 0.5, 2
    DPRMSprop   rate 0.003, 0.006, 0.01, 0.02, 0.03, 0.06;   clip 0.5, 2
    DP2RMSprop  rate 0.3, 1, 3;   SGD rate 0.06, 0.2;        delay half an epoch, an epoch
    """
    return [
        dp2.DPSGD(learning_rate=4.0, l2_norm_clip=0.5, **shared),
        dp2.DPRMSprop(learning_rate=0.02, l2_norm_clip=0.5, **shared),
        dp2.DP2RMSprop(
            learning_rate=1.0,
            l2_norm_clip=5.0,
            sgd_learning_rate=0.06,
            sgd_l2_norm_clip=0.5,
            delay=delay,
            **shared,
        ),
    ]


def logistic_regression(features: int, optimizer) -> keras.Model:
    """A private model that starts from zero."""
    dense = keras.layers.Dense(1, kernel_initializer="zeros")
    model = dp2.make_private(keras.Sequential([keras.Input((features,)), dense]))
    model.compile(
        optimizer,
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
    )
    return model


def train(optimizer, train_set, test_set, batch_size: int, epochs: int) -> dict:
    """Trains one method; a row of the table, with its test accuracy after each epoch."""
    x, y = train_set
    model = logistic_regression(x.shape[1], optimizer)
    log = model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        validation_data=test_set,
        validation_batch_size=1000,
        verbose=0,
    ).history
    return {
        "method": type(optimizer).__name__,
        "epsilon": f"{log['epsilon'][-1]:.2f}",
        "train": model.evaluate(x, y, batch_size=1000, verbose=0, return_dict=True)["accuracy"],
        "test": log["val_accuracy"][-1],
        "curve": log["val_accuracy"],
    }


def majority_class(y_train: np.ndarray, y_test: np.ndarray) -> dict:
    """The trivial predictor, which a method worth its name must beat."""
    label = float(y_train.mean() > 0.5)
    return {
        "method": "majority class",
        "epsilon": "-",
        "train": np.mean(y_train == label),
        "test": np.mean(y_test == label),
    }


def print_table(rows: list[dict]) -> None:
    """Prints a line per method."""
    print(f"\n{'method':<16}{'epsilon':>8}{'train accuracy':>16}{'test accuracy':>15}")
    for row in rows:
        print(f"{row['method']:<16}{row['epsilon']:>8}{row['train']:>16.3f}{row['test']:>15.3f}")


def plot_curves(rows: list[dict], trivial: float, path: str) -> None:
    """Writes the learning curves to a file."""
    axes = Figure(figsize=(6, 4), layout="constrained").subplots()
    for row in rows:
        axes.plot(range(1, len(row["curve"]) + 1), row["curve"], marker=".", label=row["method"])
    axes.axhline(trivial, color="grey", linestyle="--", label="majority class")
    axes.set(xlabel="epoch", ylabel="test accuracy", title=f"Test accuracy at epsilon = {rows[0]['epsilon']}")
    axes.legend()
    axes.figure.savefig(path, dpi=150)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling and the noise")
    parser.add_argument("--secret", action="store_const", const=None, dest="seed", help="no seed at all")
    parser.add_argument("--out", default="demo_curves.png", help="where the plot goes")
    parser.add_argument("--train-size", type=int, default=12_000)
    parser.add_argument("--test-size", type=int, default=4_000)
    parser.add_argument("--vocabulary-size", type=int, default=4_000)
    parser.add_argument("--batch-size", type=int, default=120, help="expected size of a Poisson batch")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--noise-multiplier", type=float, default=1.0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Runs the demo."""
    args = parse(argv)
    train_set, test_set = data.synthetic_reviews(args.train_size, args.test_size, args.vocabulary_size)
    print(f"{args.train_size:,} training reviews, {args.vocabulary_size:,} words.")
    if args.seed is not None:
        print("A fixed seed is for show: noise that can be repeated gives no guarantee (see --secret).")
    rows = []
    for optimizer in optimizers(
        delay=max(1, args.train_size // args.batch_size // 2),  # Half an epoch.
        noise_multiplier=args.noise_multiplier,
        noise_seed=args.seed,
    ):
        start = time.time()
        rows.append(train(optimizer, train_set, test_set, args.batch_size, args.epochs))
        print(f"{rows[-1]['method']}: {int(optimizer.iterations):,} steps, {time.time() - start:.0f} s")
    trivial = majority_class(train_set[1], test_set[1])
    print_table([*rows, trivial])
    print("\nThe accuracies are exact figures of the data, for you alone: epsilon covers the weights.")
    plot_curves(rows, trivial["test"], args.out)
    print(f"Learning curves: {args.out}")


if __name__ == "__main__":
    main()
