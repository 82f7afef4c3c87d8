"""What noise costs, part by part: python benchmarks/noise.py [--size 5000000] [--rounds 15]

Our normals and their parts, outside XLA and inside, beside TensorFlow's own (which end at 5.68 deviations);
the words of `noise="secure"`, which a cipher makes outside of any graph; and what both make of a sum. Medians
of interleaved rounds, in nanoseconds a normal.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from dp2_keras.noise import NoiseSource, normals_from_words
from dp2_keras.privatizer import ClippedSum, ClippingQuery, add_noise
from dp2_keras.secure_noise import SecureNoiseSource

OUTSIDE_XLA = ("secure words", "noisy sum", "secure noisy sum")


def parts(size):
    """What is measured: names, and functions of a draw number."""
    source, secure, pairs = NoiseSource(seed=0), SecureNoiseSource(seed=0), size // 2
    words = source.bits([pairs], tf.constant(0, tf.int64), stream=0, dtype=tf.uint64)
    angles = source.bits([pairs], tf.constant(1, tf.int64), stream=0)
    count = pairs + pairs // 2
    return {
        "words": lambda draw: source.bits([count], draw, stream=0, dtype=tf.uint64),
        "words of 32 bits": lambda draw: source.bits([2 * count], draw, stream=0),
        "transform": lambda draw: normals_from_words(words, angles, stddev=tf.cast(draw, tf.float32)),
        "normals": lambda draw: source.normal([size], draw, stream=0),
        "TensorFlow's normals": lambda draw: tf.random.stateless_normal([size], tf.stack([draw, draw])),
        "secure words": lambda draw: secure.bits([count], draw, stream=0, dtype=tf.uint64),
        "noisy sum": lambda draw: noisy_sum(source, size, draw),
        "secure noisy sum": lambda draw: noisy_sum(secure, size, draw),
    }


def noisy_sum(source, size, draw):
    """What a step does with a sum that is clipped."""
    variable = tf.zeros([size])
    clipped = ClippedSum(ClippingQuery([variable], None, 1.0, False), [variable])
    return add_noise(clipped, 1.0, source, draw, 0, [0])


def seconds(function, draw):
    start = time.perf_counter()
    function(draw)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    functions = {
        (name, jit): tf.function(part, jit_compile=jit, autograph=False)
        for name, part in parts(args.size).items()
        for jit in (False, True)
        if not (jit and name in OUTSIDE_XLA)
    }
    times = {key: [] for key in functions}
    for draw in range(args.rounds + 2):
        for key, function in functions.items():
            times[key].append(seconds(function, tf.constant(draw, tf.int64)))
    for (name, jit), found in times.items():
        each = 1e9 * statistics.median(found[2:]) / args.size
        print(f"{name:22} {each:6.1f} ns a normal{', inside XLA' if jit else ''}")


if __name__ == "__main__":
    main()
