"""Trains for a long time, and watches memory and speed.

    python tests/campaigns/soak.py [--steps 1000000] [--output docs/soak.md]

A small model in both phases of DP², with a budget that never ends and diagnostics on. Every hundredth of the
way: resident memory, and microseconds a step. Exit status 1 if the last tenth takes more than a quarter
longer than the second tenth, or the process has grown by more than 64 MB since then.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import dp2_keras as dp2

PARTS = 100


def resident_mb() -> float:
    """Memory of this process now."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Watch(keras.callbacks.Callback):
    """Memory and speed at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.megabytes, self.seconds = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)
        self.megabytes.append(resident_mb())
        print(f"{epoch + 1:3d} % {self.megabytes[-1]:8.1f} MB {self.seconds[-1]:8.1f} s", flush=True)


def main() -> int:
    """Runs the soak, and says whether memory and speed stayed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args()
    x = np.random.default_rng(0).normal(size=(10_000, 10)).astype(np.float32)
    model = dp2.DP2Sequential([keras.Input((10,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(
        dp2.DP2RMSprop(1e-3, 1.0, noise_multiplier=1.0, delay=50), loss="mse", steps_per_execution=100
    )
    watch, steps = Watch(), args.steps // PARTS
    budget = dp2.PrivacyBudget(1e6, delta=1e-5)
    model.fit(
        x, x[:, 0], batch_size=32, epochs=PARTS, steps_per_epoch=steps, verbose=0, callbacks=[watch, budget]
    )
    early, late = (statistics.median(watch.seconds[part]) for part in (slice(10, 20), slice(90, 100)))
    grown = max(watch.megabytes[90:]) - max(watch.megabytes[10:20])
    summary = (
        f"{model.ledger.steps:,} steps: {1e6 * early / steps:.0f} us a step in the second tenth, "
        f"{1e6 * late / steps:.0f} in the last; {grown:+.1f} MB between them"
    )
    print(summary)
    if args.output is not None:
        args.output.write_text(f"# Soak\n\nBy `make soak`: {summary}.\n")
    return 1 if late > 1.25 * early or grown > 64 or not np.isfinite(model.get_weights()[0]).all() else 0


if __name__ == "__main__":
    sys.exit(main())
