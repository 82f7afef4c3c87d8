"""What privacy's book-keeping costs: the index draw against a step, and epsilon against an epoch.

    python benchmarks/overhead.py [--rows 1000000] [--batch-size 64] [--epochs 4]

Logistic regression of 100 features, the cheapest step there is, so that the shares are the largest.
Medians over all steps and epochs after the first.
"""

import argparse
import time

import keras
import numpy as np

import dp2_keras as dp2
from dp2_keras.sampling import PoissonSampler


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class EpochTimes(keras.callbacks.Callback):
    """How long the steps of each epoch took, without what happens between epochs."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.end = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(self.end - self.start)


def fitted(rows, batch_size, epochs, steps):
    x = np.zeros((rows, 100), np.float32)
    model = dp2.make_private(keras.Sequential([keras.Input((100,)), keras.layers.Dense(1)]))
    model.compile(dp2.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), loss="mse")
    times = EpochTimes()
    model.fit(
        x, x[:, 0], batch_size=batch_size, epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=[times]
    )
    return model, np.median(times.seconds[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    steps = min(args.rows // args.batch_size, 2000)
    model, epoch = fitted(args.rows, args.batch_size, args.epochs, steps)
    sampler = PoissonSampler(args.rows, args.batch_size)
    draw = np.median([timed(lambda: sampler.rows(0)) for _ in range(2000)])
    price = np.median([timed(model.privacy_spent) for _ in range(20)])
    step = epoch / steps
    print(f"step {1e6 * step:.0f} us, index draw {1e6 * draw:.0f} us: {100 * draw / step:.1f} % of a step")
    print(f"epoch of {steps} steps {epoch:.2f} s, epsilon {1e3 * price:.2f} ms: {100 * price / epoch:.3f} %")


if __name__ == "__main__":
    main()
