"""Noise to defend against someone who sees every bit: a cipher's keystream, and sums on a grid.

The words are AES-256 in counter mode (the `cryptography` package, OpenSSL's), not Philox; the block that a
tensor starts with holds

    draw (40 bits) | stream (8 bits) | variable (16 bits) | count of blocks (64 bits)

so that no two tensors of a run share a block. Normals are made of them as in `noise.py`.

A float32 sum plus a float32 normal cannot be every float32, and which ones it can be depends on the sum
(Mironov 2012). So the sum is put on a grid first, and so is the noise:

    gamma = sigma C 2^-20                             public
    g~    = gamma ( round(s / gamma) + round(z / gamma) ),   z ~ N(0, sigma^2 (C + gamma sqrt(d))^2 I)

The result is a multiple of gamma whatever the data. It is also round((s' + z) / gamma) gamma with s' = gamma
round(s / gamma), because s' is on the grid: a function of the Gaussian mechanism's answer for s', whose
sensitivity is at most C + gamma sqrt(d), d the number of parameters, since each coordinate is moved by at
most gamma / 2. So the price is that of sigma, and nothing is left to the last bits: sums of integers below
2^52 are exact in float64, and those of the normals, below 2^24, in float32.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dp2_keras.noise import NoiseSource

STEPS_PER_DEVIATION = 2.0**20
_BLOCK_BYTES = 16


class SecureNoiseSource(NoiseSource):
    """Hands out noise from AES-256-CTR; see the top of this file.

    Args:
        seed: integer, for tests alone, or None for a secret key.

    Raises:
        ImportError: if the `cryptography` package is not installed.

    Example:
    >>> source = SecureNoiseSource(seed=0)
    >>> source.normal([2, 3], tf.constant(1, tf.int64), stream=0, variable=0).shape
    TensorShape([2, 3])
    """

    is_on_grid = True

    def __init__(self, seed: int | None = None):
        super().__init__(seed)
        self._cipher = _cipher(_fresh_secret(seed))

    def bits(self, shape, draw, *, stream, variable=0, dtype=tf.uint32):
        self._check_address(stream, variable)
        address = stream << 16 | variable

        def words(draw, shape):
            start = int(draw) << 24 | address
            stream = self._cipher(start, math.prod(shape) * dtype.size)
            return np.frombuffer(stream, dtype.as_numpy_dtype).reshape(shape)

        known = [size if isinstance(size, int) else None for size in shape]
        sizes = [tf.cast(size, tf.int64) for size in shape]
        return tf.ensure_shape(tf.numpy_function(words, [draw, sizes], dtype), known)


def _cipher(key):
    """The keystream as a function of the first block's upper half and a number of bytes."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise ImportError(
            '`noise="secure"` needs the `cryptography` package: pip install "dp2_keras[secure]"'
        ) from error

    def keystream(start, size):
        first = start.to_bytes(8, "big") + bytes(8)
        return Cipher(algorithms.AES(key), modes.CTR(first)).encryptor().update(bytes(size))

    return keystream


def _fresh_secret(seed):
    if seed is None:
        return secrets.token_bytes(32)
    return hashlib.sha256(f"dp2_keras secure:{seed}".encode()).digest()


def grid_sums(
    values: Sequence[tf.Tensor], noise: Sequence[tf.Tensor], stddev: tf.Tensor | float
) -> list[tf.Tensor]:
    """gamma (round(s / gamma) + round(z / gamma)), float64.

    Args:
        values: s, one tensor per variable.
        noise: z / gamma, float32, of deviation `grid_deviation`.
        stddev: sigma C.
    """
    gamma = tf.cast(stddev, tf.float64) / STEPS_PER_DEVIATION
    return [
        gamma * (tf.round(tf.cast(s, tf.float64) / gamma) + tf.cast(tf.round(z), tf.float64))
        for s, z in zip(values, noise)
    ]


def grid_deviation(noise_multiplier: float, parameters: int) -> float:
    """The deviation of z / gamma: 2^20 (1 + gamma sqrt(d) / C).

    Example:
    >>> grid_deviation(1.0, parameters=2**20) - 2**20  # sqrt(d) steps more.
    1024.0
    """
    return STEPS_PER_DEVIATION + noise_multiplier * math.sqrt(parameters)
