"""Per-example gradients one example after another.

    gradients[0] = gradient_fn(example_0),  for a chunk of exactly one example

For models that `tf.vectorized_map` cannot take, such as recurrent layers over
sequences too long to unroll. Exact, in the memory of one example, and slow.
"""

import tensorflow as tf


def loop(gradient_fn, query, examples, mask):
    """Clips a chunk of one example; see `chunks.clipped_sum`."""
    gradients, outputs = gradient_fn(tf.nest.map_structure(lambda t: t[0], examples))
    gradients = [g[None] for g in gradients]
    values, norms = query.each(lambda one: one.clip(gradients, mask))
    return values, norms, tf.nest.map_structure(lambda t: t[None], outputs)
