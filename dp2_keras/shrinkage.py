"""A path with known noise, less what is most likely nothing but noise.

    z = theta + N(0, V),  V known
    h(z) = z * z^2 / (z^2 + k V)

A coordinate far above its noise stays as it is, one below it all but vanishes, and one with z^2 = k V is
halved. It is a smooth form of the thresholds of wavelet shrinkage (Donoho and Johnstone, Ideal spatial
adaptation by wavelet shrinkage, 1994), with V from the privacy mechanism in place of an estimate. Where z is
private and V public, so is h(z): it is post-processing, and free.
"""

from __future__ import annotations

import tensorflow as tf


def shrunk(path: tf.Tensor, variance: tf.Tensor | float, strength: float) -> tf.Tensor:
    """Shrinks each coordinate towards 0 by what its noise may have to do with it.

    Args:
        path: z.
        variance: V, of the noise in each coordinate of z; 0 or more.
        strength: k, 0 or more; 0 leaves z alone.

    Returns:
        h(z), of the shape and dtype of z, between 0 and z.

    Example:
    >>> shrunk(tf.constant([-0.5, 2.0, 10.0]), variance=1.0, strength=4.0).numpy().round(3)
    array([-0.029,  1.   ,  9.615], dtype=float32)
    """
    noise = tf.cast(strength * variance, path.dtype)
    return path / (1.0 + tf.math.divide_no_nan(noise, tf.square(path)))
