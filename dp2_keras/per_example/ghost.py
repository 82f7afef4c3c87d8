"""Clipped sums from one forward and one backward pass over a real batch.

    forward    a: what each layer was given
    backward   d: the gradient of each example's own loss at each layer's output
    norms      ||S g_i||^2 = sum over variables of what (a_i, d_i) contribute
    sum        sum_i c_i S g_i, from the same a and d, without a second backward pass

The backward pass is of the sum of the examples' losses: d_i is example i's own as long
as no operation mixes examples, which `operations.check` makes sure of. Memory is that
of the activations and the parameters, never of examples x parameters. An idea of
Goodfellow (arXiv:1510.01799); the scale inside the norm is what DP² needs.
"""

from __future__ import annotations

import tensorflow as tf

from dp2_keras import _keras, privatizer
from dp2_keras.per_example import capture, contributions
from dp2_keras.per_example.layers import default_registry


def ghost(example_pass, query, examples, mask):
    """Clips and sums a chunk of examples; see `chunks.clipped_sum`.

    Args:
        example_pass: gives the `outputs` of a batch, and the `losses` of its examples.
        query, examples, mask: as for the other strategies.

    Raises:
        ValueError: if a weight is used outside the layer that owns it.
    """
    calls, gradients, outputs = backward(example_pass, query.variables, examples)
    parts = _contributions(query.variables, calls, gradients)
    values, norms = query.by_scale(lambda scales: _clip(query, parts, scales, mask))
    return values, norms, outputs


def backward(example_pass, variables, examples):
    """The recorded calls, the gradients at their outputs, and the outputs of the model."""
    units = capture.units(example_pass.model, default_registry())
    with tf.GradientTape() as tape:
        with capture.recorded(units, tape) as calls:
            outputs = example_pass.outputs(examples)
        losses = example_pass.losses(examples, outputs)
    recorded, weights = [call.output for call in calls], [_keras.native(v) for v in variables]
    gradients = tape.gradient(losses, recorded + weights)
    _check_bypass(variables, gradients[len(recorded) :])
    return calls, gradients[: len(recorded)], outputs


def _check_bypass(variables, gradients):
    for variable, gradient in zip(variables, gradients):
        if gradient is not None:
            raise ValueError(
                f"Weight '{variable.name}' is used outside the layer that owns it, or in a loop, where "
                '`method="ghost"` cannot see what for: compile the model with `method="vectorized"`.'
            )


def _contributions(variables, calls, gradients):
    """One contribution per variable, of all the calls that used it."""
    found = {id(variable): [] for variable in variables}
    for call, d in zip(calls, gradients):
        if d is not None:
            for variable, contribution in _of_call(call, d):
                found[id(variable)].append(contribution)
    return [_joined(variable, found[id(variable)]) for variable in variables]


def _of_call(call, d):
    layer, kind = call.unit.layer, call.unit.kind
    dtype = privatizer.compute_dtype(d.dtype)
    inputs = call.args[0] if call.args else call.kwargs["inputs"]
    inputs = tf.cast(inputs, dtype) if inputs.dtype.is_floating else inputs
    found = kind.contributions(layer, inputs, tf.cast(d, dtype))
    trainable = [id(variable) for variable in layer.trainable_variables]
    named = [(getattr(layer, name, None), contribution) for name, contribution in found.items()]
    return [(variable, contribution) for variable, contribution in named if id(variable) in trainable]


def _joined(variable, parts):
    if not parts:
        return contributions.Nothing(variable.shape, privatizer.compute_dtype(variable.dtype))
    return parts[0] if len(parts) == 1 else contributions.Total(parts)


def _clip(query, parts, scales, mask):
    scales = scales or [None] * len(parts)
    zeros = tf.zeros(tf.shape(mask), tf.float64)
    squared = sum((part.squared_norms(scale) for part, scale in zip(parts, scales)), zeros)
    factors, kept, norms = query.factors(squared, mask)
    sums = [part.weighted_sum(factors, kept) for part in parts]
    return [privatizer.scale_by(value, scale) for value, scale in zip(sums, scales)], norms
