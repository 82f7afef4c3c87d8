"""The gradients of single examples, all of them kept: for public data alone.

    g[k][i] = gradient of example i's own loss to variable k

Nothing of it is clipped or summed, so that it may never be of private examples. As for clipped sums there is
a function for each method, of a pass, the variables and the examples.
"""

from __future__ import annotations

import math

import tensorflow as tf

from dp2_keras import privatizer
from dp2_keras.per_example.ghost import contributions
from dp2_keras.per_example.mapping import map_examples


def vectorized(example_pass, variables, examples):
    """All at once, every example a batch of its own."""
    del variables
    return map_examples(lambda example: example_pass(example)[0], examples)


def loop(example_pass, variables, examples):
    """One after another, every example a batch of its own."""
    like = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    gradients = lambda example: example_pass(example)[0]  # noqa: E731
    return tf.map_fn(gradients, examples, fn_output_signature=like, parallel_iterations=1)


def ghost(example_pass, variables, examples):
    """Of one real batch, made of what layers were given and put out."""
    parts, _ = contributions(example_pass, variables, examples)
    count = tf.shape(examples[0][0])[0]
    found = [tf.zeros([count, *v.shape], privatizer.compute_dtype(v.dtype)) for v in variables]
    for numbers, part in parts.items():
        sizes = [math.prod(variables[k].shape) for k in numbers]
        pieces = tf.split(tf.reshape(part.each(), [count, sum(sizes)]), sizes, axis=1)
        for k, piece in zip(numbers, pieces):
            found[k] = tf.reshape(piece, [count, *variables[k].shape])
    return found
