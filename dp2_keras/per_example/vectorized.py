"""Per-example gradients of a whole chunk at once, by `tf.vectorized_map`.

    gradients[i] = gradient_fn(example_i),  for all i in one vectorized graph

Each example sees a batch of one, so no layer can mix two of them. An operation that
TensorFlow cannot vectorize runs in a loop over the examples, with the same result. Memory grows as
chunk x parameters; `physical_batch_size` bounds the chunk.
"""

from dp2_keras.per_example.mapping import map_examples


def vectorized(gradient_fn, query, examples, mask):
    """Clips and sums a chunk of examples; see `chunks.clipped_sum`."""
    gradients, outputs = map_examples(gradient_fn, examples)
    values, norms = query.each(lambda one: one.clip(gradients, mask))
    return values, norms, outputs
