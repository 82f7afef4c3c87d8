"""Keyed, stateless Gaussian noise with full support.

TensorFlow's own normals never exceed 5.68 standard deviations, which alone breaks an
(epsilon, delta) guarantee at delta = 1e-5. Here a pair of normals is made from a word w of
64 bits and a word a of 32 by the Box-Muller transform:

    u = (w + 1/2) / 2^64                       in (0, 1], as small as 2^-65
    r = sqrt(-2 ln u)                          up to 9.49
    (z1, z2) = r (cos t, sin t),  t = 2 pi a / 2^32

The words are Philox-4x32-10 of (key, counter). A 128-bit key is split into Philox's
own 64-bit key and a mask for the upper half of the counter, which holds

    draw (40 bits) | stream (8 bits) | variable (16 bits)

while the lower half counts the words. So the noise is an injective function of
(draw, stream, variable) for each key, and no two tensors of a run share a word.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets

import numpy as np
import tensorflow as tf

from dp2_keras.variables import own_variable

_PHILOX = 1
_MAX_STREAMS = 1 << 8
_MAX_VARIABLES = 1 << 16
_TICKETS = itertools.count()


def normals_from_words(words: tf.Tensor, angles: tf.Tensor, stddev: tf.Tensor | float = 1.0) -> tf.Tensor:
    """Turns words into normals; the transform at the top of this file.

    Args:
        words: uint64 words w of shape [n].
        angles: uint32 words a of shape [n].
        stddev: the deviation, which costs least where it multiplies the radius.

    Returns:
        float32 tensor of shape [2 n]. Every value is finite, at most 9.5 deviations in size.
    """
    uniform = tf.cast(words, tf.float32) * 2.0**-64 + 2.0**-65
    radius = stddev * tf.sqrt(-2.0 * tf.math.log(uniform))
    turn = tf.cast(angles, tf.float32) * (2.0 * math.pi * 2.0**-32)
    return tf.concat([radius * tf.cos(turn), radius * tf.sin(turn)], axis=0)


class NoiseSource:
    """Holds a key and hands out noise; the key never leaves it.

    Without a seed the key comes from the operating system, and the draw counter only
    ever grows: it is not part of any checkpoint, and a copy of the source has a key
    of its own. With a seed (tests and experiments only: there is no privacy once the
    seed is known) the counter is the training step, so that a resumed run repeats the
    uninterrupted one.

    The key lives in a `tf.Variable` of this plain object. A constant would be written
    into every graph, and a tracked variable into every checkpoint.

    Args:
        seed: integer, or None for a secret key.

    Attributes:
        ticket: a number that no other source of this process has, nor a copy.

    Example:
    >>> source = NoiseSource(seed=0)
    >>> draw = source.next_draw(step=tf.constant(0, tf.int64))
    >>> source.normal([2, 3], draw, stream=0, variable=0).shape
    TensorShape([2, 3])
    """

    is_on_grid = False  # Whether sums are put on a grid before they are released; see `secure_noise.py`.

    def __init__(self, seed: int | None = None):
        self.seed, self.ticket = seed, next(_TICKETS)
        self._key = own_variable(_fresh_key(seed), tf.uint64)
        self._draws = own_variable(0, tf.int64)

    def next_draw(self, step: tf.Tensor) -> tf.Tensor:
        """The draw number of this step: never the same twice without a seed."""
        if self.seed is not None:
            return tf.cast(step, tf.int64)
        # Read at once: `assign_add` gives a variable, which would be read when it is used.
        return tf.convert_to_tensor(self._draws.assign_add(1))

    def bits(
        self, shape, draw: tf.Tensor, *, stream: int, variable: int = 0, dtype: tf.DType = tf.uint32
    ) -> tf.Tensor:
        """uint32 or uint64 words, each of them uniform."""
        self._check_address(stream, variable)
        address = draw * (_MAX_STREAMS * _MAX_VARIABLES) + (stream * _MAX_VARIABLES + variable)
        key = tf.identity(self._key)
        upper = tf.bitwise.bitwise_xor(tf.bitcast(address, tf.uint64), key[1])
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=shape,
            key=key[:1],
            counter=tf.stack([tf.zeros_like(upper), upper]),
            alg=_PHILOX,
            dtype=dtype,
        )

    def _check_address(self, stream, variable):
        if not (0 <= stream < _MAX_STREAMS and 0 <= variable < _MAX_VARIABLES):
            raise ValueError(
                f"`stream` must be below {_MAX_STREAMS} and `variable` below "
                f"{_MAX_VARIABLES}. Received: stream={stream}, variable={variable}"
            )

    def normal(
        self, shape, draw: tf.Tensor, *, stream: int, variable: int = 0, stddev: tf.Tensor | float = 1.0
    ) -> tf.Tensor:
        """Normals of a static shape, float32."""
        size = math.prod(shape)
        pairs = -(-size // 2)
        # All of them words of 64 bits: XLA takes ten times as long to make those of 32.
        words = self.bits([pairs + -(-pairs // 2)], draw, stream=stream, variable=variable, dtype=tf.uint64)
        angles = tf.reshape(tf.bitcast(words[pairs:], tf.uint32), [-1])[:pairs]
        return tf.reshape(normals_from_words(words[:pairs], angles, stddev)[:size], shape)

    def __repr__(self):
        return f"{type(self).__name__}(seed={self.seed})"

    def __reduce__(self):
        return type(self), (self.seed,)

    def __copy__(self):
        return type(self)(self.seed)

    def __deepcopy__(self, memo):
        return type(self)(self.seed)


def _fresh_key(seed):
    if seed is None:
        return np.frombuffer(secrets.token_bytes(16), np.uint64)
    return np.frombuffer(hashlib.sha256(f"dp2_keras:{seed}".encode()).digest()[:16], np.uint64)
