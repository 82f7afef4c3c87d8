"""Tests a billion normals of each source of noise.

    python tests/campaigns/battery.py [--samples 1000000000] [--output docs/battery.md]

    uniform     Phi(z) in 4,096 equal bins                                      chi-squared
    moments     the mean of z^k, k = 1 ... 8                                    normal
    tails       how many |z| lie beyond 4, 4.5 and 5                            Poisson
    pairs       z and its neighbour, its partner of the same radius, the same place of the next draw,
                of another variable and of another stream: products, and products of z^2 - 1    normal
    angle       of partners, in 4,096 equal bins                                chi-squared

A billion says nothing of what is rarer than a few in a billion: tests/test_noise.py tests the tail by forcing
bits. Exit status 1 if one of the p-values is below 1e-6.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from scipy import stats

from dp2_keras.noise import NoiseSource
from dp2_keras.secure_noise import SecureNoiseSource

CHUNK, BINS, MOMENTS, TAILS = 1 << 23, 4096, range(1, 9), (4.0, 4.5, 5.0)
LEAST_P_VALUE = 1e-6


def double_factorial(k: int) -> float:
    """E z^k of a normal: (k - 1)!! for even k, else 0."""
    return float(np.prod(np.arange(k - 1, 0, -2))) if k % 2 == 0 else 0.0


def pairings(source, draw):
    """z, and what it must be independent of, by name."""
    z = source.normal([CHUNK], draw, stream=0, variable=0)
    return z, {
        "neighbour": tf.roll(z, 1, 0),
        "partner": tf.roll(z, CHUNK // 2, 0),
        "next draw": source.normal([CHUNK], draw + 1, stream=0, variable=0),
        "other variable": source.normal([CHUNK], draw, stream=0, variable=1),
        "other stream": source.normal([CHUNK], draw, stream=2, variable=0),
    }


def counts_of(source):
    """A compiled function of a draw that gives everything that is added up."""

    @tf.function
    def counted(draw):
        z32, others = pairings(source, draw)
        z = tf.cast(z32, tf.float64)
        uniform = 0.5 * tf.math.erfc(-z / np.sqrt(2.0))
        turn = tf.atan2(z32[CHUNK // 2 :], z32[: CHUNK // 2]) / (2 * np.pi) + 0.5
        products = {name: tf.reduce_sum(z * tf.cast(o, tf.float64)) for name, o in others.items()}
        squares = {
            name: tf.reduce_sum((z * z - 1.0) * (tf.square(tf.cast(o, tf.float64)) - 1.0))
            for name, o in others.items()
        }
        return {
            "uniform": binned(uniform),
            "angle": binned(turn),
            "moments": tf.stack([tf.reduce_sum(z**k) for k in MOMENTS]),
            "tails": tf.stack([tf.math.count_nonzero(tf.abs(z32) > t) for t in TAILS]),
            "products": products,
            "squares": squares,
        }

    return counted


def binned(uniform):
    """How many fall into each of the bins."""
    places = tf.clip_by_value(tf.cast(uniform * BINS, tf.int32), 0, BINS - 1)
    return tf.math.bincount(places, minlength=BINS, maxlength=BINS, dtype=tf.int64)


def added_up(source, samples: int):
    """The counts over all chunks, and their number."""
    counted, total = counts_of(source), None
    chunks = -(-samples // CHUNK)
    for k in range(chunks):
        found = tf.nest.map_structure(lambda t: t.numpy(), counted(tf.constant(2 * k, tf.int64)))
        total = found if total is None else tf.nest.map_structure(np.add, total, found)
    return total, chunks * CHUNK


def p_values(total, samples: int):
    """The p-value of each test, by name."""
    yield "uniform", stats.chisquare(total["uniform"]).pvalue
    yield "angle", stats.chisquare(total["angle"]).pvalue
    for k, found in zip(MOMENTS, total["moments"]):
        deviation = np.sqrt((double_factorial(2 * k) - double_factorial(k) ** 2) * samples)
        yield f"moment {k}", two_sided((found - samples * double_factorial(k)) / deviation)
    for limit, found in zip(TAILS, total["tails"]):
        expected = 2 * stats.norm.sf(limit) * samples
        below, above = stats.poisson.cdf(found, expected), stats.poisson.sf(found - 1, expected)
        yield f"beyond {limit}", min(1.0, 2 * min(below, above))
    for name in total["products"]:
        # A partner's partner is z itself, so each pair is there twice.
        repeats = 2 if name == "partner" else 1
        yield f"{name}", two_sided(total["products"][name] / np.sqrt(repeats * samples))
        yield f"{name}, squared", two_sided(total["squares"][name] / np.sqrt(4 * repeats * samples))


def two_sided(score: float) -> float:
    """The p-value of a standard normal score."""
    return float(2 * stats.norm.sf(abs(score)))


def main() -> int:
    """Runs the battery, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10**9)
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args()
    columns, notes = {}, []
    for name, source in {"fast": NoiseSource(), "secure": SecureNoiseSource()}.items():
        start = time.perf_counter()
        total, samples = added_up(source, args.samples)
        columns[name] = dict(p_values(total, samples))
        notes.append(f"{name} {samples:,} normals, {time.perf_counter() - start:.0f} s")
        print(notes[-1], f"least p-value {min(columns[name].values()):.2g}", flush=True)
    lines = [
        f"| {test} | {columns['fast'][test]:.3g} | {columns['secure'][test]:.3g} |"
        for test in columns["fast"]
    ]
    table = "\n".join(["| test | fast | secure |", "|---|---|---|", *lines])
    print(table)
    if args.output is not None:
        args.output.write_text(
            f"# A billion normals\n\nBy `make battery` ({'; '.join(notes)}): p-values.\n\n{table}\n"
        )
    least = min(p for column in columns.values() for p in column.values())
    return 0 if least > LEAST_P_VALUE else 1


if __name__ == "__main__":
    sys.exit(main())
