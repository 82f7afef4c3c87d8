"""What noise costs, part by part: python benchmarks/noise.py [--size 5000000] [--rounds 15]

Our normals and their parts, outside XLA and inside, beside TensorFlow's own (which end at 5.68 deviations).
Medians of interleaved rounds, in nanoseconds a normal.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from dp2_keras.noise import NoiseSource, normals_from_words


def parts(size):
    """What is measured: names, and functions of a draw number."""
    source, pairs = NoiseSource(seed=0), size // 2
    words = source.bits([pairs], tf.constant(0, tf.int64), stream=0, dtype=tf.uint64)
    angles = source.bits([pairs], tf.constant(1, tf.int64), stream=0)
    count = pairs + pairs // 2
    return {
        "words": lambda draw: source.bits([count], draw, stream=0, dtype=tf.uint64),
        "words of 32 bits": lambda draw: source.bits([2 * count], draw, stream=0),
        "transform": lambda draw: normals_from_words(words, angles, stddev=tf.cast(draw, tf.float32)),
        "normals": lambda draw: source.normal([size], draw, stream=0),
        "TensorFlow's normals": lambda draw: tf.random.stateless_normal([size], tf.stack([draw, draw])),
    }


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
    }
    times = {key: [] for key in functions}
    for draw in range(args.rounds + 2):
        for key, function in functions.items():
            times[key].append(seconds(function, tf.constant(draw, tf.int64)))
    for name in parts(args.size):
        plain, jit = (1e9 * statistics.median(times[name, jit][2:]) / args.size for jit in (False, True))
        print(f"{name:22} {plain:6.1f} ns a normal, {jit:6.1f} inside XLA")


if __name__ == "__main__":
    main()
