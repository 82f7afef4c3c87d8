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

import collections

import tensorflow as tf

from dp2_keras import _keras, privatizer
from dp2_keras.per_example import blocks, capture
from dp2_keras.per_example.layers import default_registry, fallback


def ghost(example_pass, query, examples, mask):
    """Clips and sums a chunk of examples; see `chunks.clipped_sum`.

    Args:
        example_pass: gives the `outputs` of a batch, and their `output_gradients`.
        query, examples, mask: as for the other strategies.

    Raises:
        ValueError: if a weight is used outside the layer that owns it.
    """
    parts, outputs = contributions(example_pass, query.variables, examples)
    answers = lambda parts: query.each(lambda one: _answer(one, parts, mask))  # noqa: E731
    values, norms = _in_memory(answers, parts, mask)
    return values, norms, outputs


def contributions(example_pass, variables, examples):
    """What each set of variables gets, by the variables' numbers; and the outputs of the model."""
    units = capture.units(example_pass.model, default_registry())
    with tf.GradientTape() as tape:
        with capture.recorded(units, tape) as calls:
            outputs = example_pass.outputs(examples)
    at_outputs = example_pass.output_gradients(examples, outputs)
    targets, at_targets = zip(*[(t, d) for t, d in zip(outputs, at_outputs) if t.dtype.is_floating])
    recorded, weights = [call.output for call in calls], [_keras.native(v) for v in variables]
    gradients = tape.gradient(targets, recorded + weights, output_gradients=at_targets)
    _check_bypass(variables, gradients[len(recorded) :])
    return _by_variables(variables, calls, gradients[: len(recorded)]), outputs


def _check_bypass(variables, gradients):
    for variable, gradient in zip(variables, gradients):
        if gradient is not None:
            raise ValueError(
                f"Weight '{variable.name}' is used outside the layer that owns it, or in a loop, where "
                '`method="ghost"` cannot see what for: compile the model with `method="vectorized"`.'
            )


def _by_variables(variables, calls, gradients):
    """The contributions of all calls, by sets of variables that have none in common."""
    number = {id(variable): k for k, variable in enumerate(variables)}
    found = {}
    for call, d in zip(calls, gradients):
        for held, contribution in _of_call(call, d) if d is not None else []:
            found.setdefault(tuple(number[id(v)] for v in held), []).append(contribution)
    counts = collections.Counter(k for numbers in found for k in numbers)
    for k, count in counts.items():
        if count > 1:
            raise ValueError(_SHARED.format(name=variables[k].name))
    return {n: first.plus(others) if others else first for n, (first, *others) in found.items()}


_SHARED = (
    "Weight '{name}' is shared with a layer that has no formula for it: compile the model with "
    '`method="vectorized"`.'
)


def _of_call(call, d):
    """Pairs of variables and their contribution, for one call of a layer."""
    layer, kind = call.unit.layer, call.unit.kind
    d = _in_compute_dtype(d)
    if kind is None:
        return [(layer.trainable_variables, fallback.contribution(layer, call.args, call.kwargs, d))]
    inputs = call.args[0] if call.args else call.kwargs["inputs"]
    found = kind.contributions(layer, _in_compute_dtype(inputs), d)
    trainable = [id(variable) for variable in layer.trainable_variables]
    named = [(getattr(layer, name, None), contribution) for name, contribution in found.items()]
    return [([variable], contribution) for variable, contribution in named if id(variable) in trainable]


def _in_compute_dtype(tensor):
    return tf.cast(tensor, privatizer.compute_dtype(tensor.dtype)) if tensor.dtype.is_floating else tensor


def _in_memory(answers, parts, mask):
    """Gradients that have to be made are made once, if all fit in memory, else for each norm and each sum."""
    elements = sum(part.elements() for part in parts.values() if part.is_made)
    most = blocks.HELD_ELEMENTS // max(elements, 1)  # Of rows: the number of all elements may be no int32.
    fits = blocks.row_count(mask) <= most
    held = lambda: answers({n: part.held() for n, part in parts.items()})  # noqa: E731
    in_blocks = lambda: answers(parts)  # noqa: E731
    if isinstance(fits, bool) or not elements:
        return held() if elements and fits else in_blocks()
    return tf.cond(fits, held, in_blocks)


def _answer(query, parts, mask):
    """The clipped sums of the gradients, or of their squares; and the norms."""

    def of_squares(scales):
        squares = {n: part.squared() for n, part in parts.items()}
        return _clip(query, squares, scales and list(map(tf.square, scales)), mask)

    def of_gradients(scales):
        return _clip(query, parts, scales, mask)

    return query.by_square(lambda squared: query.by_scale(of_squares if squared else of_gradients))


def _clip(query, parts, scales, mask):
    """The clipped sums, and the norms, of what the parts hold."""
    joined = dict.fromkeys(parts)
    if scales is not None:
        joined = {n: _joined([scales[k] for k in n], part.shape) for n, part in parts.items()}
    zeros = tf.zeros(tf.shape(mask), tf.float64)
    squared = sum((part.squared_norms(joined[n]) for n, part in parts.items()), zeros)
    factors, kept, norms = query.factors(squared, mask)
    values = query.zeros()
    for n, part in parts.items():
        total = privatizer.scale_by(query.total_unmade(factors, part, kept), joined[n])
        for k, value in zip(n, _split(total, [values[k] for k in n])):
            values[k] = tf.cast(value, values[k].dtype)
    return values, norms


def _joined(tensors, shape):
    """All entries of some tensors, in one of that shape."""
    return tf.reshape(tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0), shape)


def _split(total, like):
    """What `_joined` joined, in the shapes of others."""
    parts = tf.split(tf.reshape(total, [-1]), [t.shape.num_elements() for t in like])
    return [tf.reshape(part, t.shape) for part, t in zip(parts, like)]
