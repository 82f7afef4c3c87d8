"""A layer without a formula, such as LSTM: its own gradient, one example at a time.

    g_i = the gradient at w of sum(layer(a_i; w) * d_i),   a_i and d_i a batch of one

for all weights of the layer in one vector, a block of examples in one vectorized map.
The model around it stays in the ghost path. Refused where the layer draws random
numbers, which a second call would draw anew.
"""

from __future__ import annotations

import math

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.contributions import Made
from dp2_keras.per_example.mapping import map_examples


def contribution(layer, args, kwargs, d):
    """That of all trainable weights of the layer, flat and in their order.

    Raises:
        ValueError: if the layer may draw random numbers.
    """
    if _keras.may_draw(layer):
        raise ValueError(
            f"Layer '{layer.name}' ({type(layer).__name__}) has no formula and may draw random numbers: "
            'compile the model with `method="vectorized"`.'
        )
    flat = tf.nest.flatten((args, kwargs))
    is_row = [tf.is_tensor(t) and t.shape.rank not in (0, None) for t in flat]
    rows = [t for t, mapped in zip(flat, is_row) if mapped]

    def make(*operands):
        *rows, d = operands
        return map_examples(one, (rows, d))

    def one(row):
        rows, d = row
        again = iter(rows)
        given = [next(again)[None] if mapped else t for t, mapped in zip(flat, is_row)]
        args_of_one, kwargs_of_one = tf.nest.pack_sequence_as((args, kwargs), given)
        return _flat_gradient(layer, args_of_one, kwargs_of_one, d[None])

    size = sum(math.prod(v.shape) for v in layer.trainable_variables)
    return Made(make, [*rows, d], [size])


def _flat_gradient(layer, args, kwargs, d):
    variables = [_keras.native(v) for v in layer.trainable_variables]
    with _keras.unrolled(layer), tf.GradientTape() as tape:
        outputs = layer(*args, **kwargs)
    at_outputs = tf.cast(d, outputs.dtype)
    gradients = tape.gradient(outputs, variables, output_gradients=at_outputs, unconnected_gradients="zero")
    return tf.concat([tf.reshape(tf.cast(g, d.dtype), [-1]) for g in gradients], axis=0)
