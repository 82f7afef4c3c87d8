"""TF Privacy's MNIST tutorial, before and after: one model, one set of batches, one table.

The tutorial's network and settings are trained by DP-SGD through TF Privacy's optimizers, through its
`DPSequential`, and through this library. All methods start from the same weights and see the same
Poisson batches, so that they have the same epsilon; they differ in noise and in time.

    python examples/migrate_from_tf_privacy.py --data mnist.npz
    python examples/migrate_from_tf_privacy.py --data mnist.npz --methods DPSequential dp2_keras

TF Privacy 0.9 needs Keras 2. Where it cannot be imported, this library is trained alone. See
docs/migrating.md for the lines that change.
"""

from __future__ import annotations

import argparse
import os
import re
import time

import keras
import numpy as np

import dp2_keras as dp2

try:
    import tensorflow_privacy
except (ImportError, AttributeError) as error:  # Newer TensorFlow lacks what it imports.
    tensorflow_privacy, missing = None, error

OURS = "dp2_keras"
METHODS = ("DPKerasSGDOptimizer", "VectorizedDPKerasSGDOptimizer", "DPSequential", OURS)


def layers() -> list:
    """The tutorial's network."""
    return [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(16, 8, strides=2, padding="same", activation="relu"),
        keras.layers.MaxPool2D(2, 1),
        keras.layers.Conv2D(32, 4, strides=2, padding="valid", activation="relu"),
        keras.layers.MaxPool2D(2, 1),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10),
    ]


def with_private_optimizer(name: str, args: argparse.Namespace) -> keras.Model:
    """Before, in TF Privacy's first form: a plain model, a private optimizer, an unreduced loss.

    `num_microbatches=None` clips each example by itself, as the tutorial's 250 of 250 does, and is the
    one setting that takes batches of varying size.
    """
    model = keras.Sequential(layers())
    optimizer = getattr(tensorflow_privacy, name)(
        l2_norm_clip=args.l2_norm_clip,
        noise_multiplier=args.noise_multiplier,
        num_microbatches=None,
        learning_rate=args.learning_rate,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def with_private_model(args: argparse.Namespace) -> keras.Model:
    """Before, in TF Privacy's second form: a private model, a plain optimizer."""
    model = tensorflow_privacy.DPSequential(
        l2_norm_clip=args.l2_norm_clip,
        noise_multiplier=args.noise_multiplier,
        use_xla=args.xla,
        layers=layers(),
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(args.learning_rate), loss=loss, metrics=["accuracy"])
    return model


def with_this_library(args: argparse.Namespace) -> keras.Model:
    """After."""
    model = dp2.make_private(keras.Sequential(layers()))
    optimizer = dp2.DPSGD(
        l2_norm_clip=args.l2_norm_clip,
        noise_multiplier=args.noise_multiplier,
        learning_rate=args.learning_rate,
        expected_batch_size=args.batch_size,
        noise_seed=args.seed,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=args.xla)
    return model


def compiled(method: str, args: argparse.Namespace) -> keras.Model:
    """The model of a method, with the weights of the seed."""
    keras.utils.set_random_seed(args.seed)
    if method == OURS:
        return with_this_library(args)
    return with_private_model(args) if method == "DPSequential" else with_private_optimizer(method, args)


def train(method: str, args: argparse.Namespace, train_set, test_set) -> dict:
    """Trains one method; a row of the table."""
    size, clock, model = len(train_set[0]), Clock(), compiled(method, args)
    # The seed makes the batches the same for all; a guarantee needs batches without one.
    batches = dp2.poisson_batches(*train_set, batch_size=args.batch_size, seed=args.seed)
    sampling = {"sampling": "poisson", "dataset_size": size} if method == OURS else {}
    model.fit(
        batches,
        epochs=args.epochs,
        steps_per_epoch=size // args.batch_size,
        callbacks=[clock],
        verbose=0,
        **sampling,
    )
    accuracy = np.mean(model.predict(test_set[0], batch_size=1000, verbose=0).argmax(1) == test_set[1])
    epsilon = model.privacy_spent() if method == OURS else tf_privacy_epsilon(args, size)
    return {"method": method, "epsilon": epsilon, "accuracy": accuracy, **clock.seconds()}


class Clock(keras.callbacks.Callback):
    """Notes when each step ends."""

    def on_train_begin(self, logs=None):
        """Starts."""
        self.times = [time.perf_counter()]

    def on_train_batch_end(self, batch, logs=None):
        """Notes a step."""
        self.times.append(time.perf_counter())

    def seconds(self) -> dict:
        """The median step, without the first, which is traced and compiled; and all of them."""
        return {"step": np.median(np.diff(self.times)[1:]), "total": self.times[-1] - self.times[0]}


def tf_privacy_epsilon(args: argparse.Namespace, size: int) -> float:
    """What TF Privacy's own statement says of Poisson samples, to its three decimals."""
    steps = args.epochs * (size // args.batch_size)
    statement = tensorflow_privacy.compute_dp_sgd_privacy_statement(
        number_of_examples=size,
        batch_size=args.batch_size,
        num_epochs=(steps - 0.5) * args.batch_size / size,  # It rounds the number of steps up.
        noise_multiplier=args.noise_multiplier,
        delta=dp2.default_delta(size),
        used_microbatching=False,
    )
    return float(re.search(r"Poisson sampling \(\*\): *([\d.]+)", statement).group(1))


def load(path: str, train_size: int) -> tuple:
    """MNIST as in the tutorial, from a file or, where there is none, from Keras."""
    if os.path.exists(path):
        with np.load(path) as file:
            arrays = [file[name] for name in ("x_train", "y_train", "x_test", "y_test")]
    else:
        arrays = [array for pair in keras.datasets.mnist.load_data() for array in pair]
    x_train, y_train, x_test, y_test = arrays
    pixels = lambda x: np.asarray(x, np.float32)[..., None] / 255  # noqa: E731
    return (pixels(x_train[:train_size]), y_train[:train_size]), (pixels(x_test), y_test)


def available(methods: list[str]) -> list[str]:
    """The methods that can run here."""
    if tensorflow_privacy is not None:
        return methods
    print(f"TF Privacy cannot be imported here ({missing}). It needs Keras 2: TensorFlow 2.15 or older.")
    return [method for method in methods if method == OURS]


def print_table(rows: list[dict], trivial: float) -> None:
    """Prints a line per method, and the trivial predictor, which it must beat."""
    print(f"\n{'method':<32}{'epsilon':>8}{'test accuracy':>15}{'s/step':>9}{'total s':>9}")
    for row in rows:
        print(
            f"{row['method']:<32}{row['epsilon']:>8.3f}{row['accuracy']:>15.3f}"
            f"{row['step']:>9.3f}{row['total']:>9.1f}"
        )
    print(f"{'majority class':<32}{'-':>8}{trivial:>15.3f}{'-':>9}{'-':>9}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="mnist.npz", help="MNIST; downloaded if there is no such file")
    parser.add_argument("--train-size", type=int, default=15_000, help="the first so many images")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=250, help="expected size of a Poisson batch")
    parser.add_argument("--learning-rate", type=float, default=0.15)
    parser.add_argument("--l2-norm-clip", type=float, default=1.0)
    parser.add_argument("--noise-multiplier", type=float, default=1.1)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the batches and the noise")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--xla", action="store_true", help="compile DPSequential and dp2_keras with XLA")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Trains the methods and prints the table."""
    args = parse(argv)
    train_set, test_set = load(args.data, args.train_size)
    print(f"{len(train_set[0]):,} images, delta = {dp2.default_delta(len(train_set[0]))}.")
    print("The fixed seed is for the comparison: noise and batches that can be repeated give no guarantee.")
    rows = []
    for method in available(args.methods):
        rows.append(train(method, args, train_set, test_set))
        print(f"{method}: {rows[-1]['total']:.0f} s")
    majority = np.bincount(train_set[1]).argmax()
    print_table(rows, trivial=np.mean(test_set[1] == majority))


if __name__ == "__main__":
    main()
