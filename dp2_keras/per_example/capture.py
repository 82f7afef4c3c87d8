"""What each layer with weights was given and put out in one forward pass of a batch.

    y_t = f(a_t, stop_gradient(w))

Inside a recorded call the weights are constants, so that the tape's gradient at y is d,
and its gradient at w is None, unless someone reads w elsewhere: that is how a weight
used outside its layer is found.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.layers import LayerKind, Registry


@dataclasses.dataclass(frozen=True)
class Unit:
    """A layer whose calls are recorded as a whole.

    Attributes:
        layer: the layer.
        kind: its formula; None for a layer without one.
    """

    layer: object
    kind: LayerKind | None


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a unit: what it was given, and what it put out before its activation."""

    unit: Unit
    args: tuple
    kwargs: dict
    output: tf.Tensor


def units(model, registry: Registry) -> list[Unit]:
    """The layers with trainable weights, each as large as it must be and as small as it can.

    A layer with a formula is one unit; so is a layer with weights of its own, or that
    loops over time. What only holds other layers is looked into.
    """
    found = {}
    for layer in _keras.sublayers(model):
        if layer.trainable_variables:
            kind = registry.find(layer)
            whole = kind or _keras.own_trainable_variables(layer) or _keras.recurrent_layers(layer)
            for unit in [Unit(layer, kind)] if whole else units(layer, registry):
                found[id(unit.layer)] = unit
    return list(found.values())


@contextlib.contextmanager
def recorded(units: list[Unit], tape: tf.GradientTape) -> Iterator[list[Call]]:
    """Inside, calls of the units are listed, and their outputs watched by the tape."""
    calls, here = [], _place()

    def recording(unit):
        layer, original = unit.layer, _keras.call_function(unit.layer)
        activation = getattr(layer, "activation", None) if unit.kind else None
        linear = [(layer, "activation", None)] if activation is not None else []

        @tf.autograph.experimental.do_not_convert
        def call(*args, **kwargs):
            if _place() != here:  # Keras 2 infers shapes in a graph of its own.
                return original(*args, **kwargs)
            with _constant_weights(layer), _keras.attributes(linear):
                output = _one_tensor(original(*args, **kwargs), layer)
            tape.watch(output)
            calls.append(Call(unit, args, kwargs, output))
            return output if activation is None else activation(output)

        return call

    with _keras.attributes([(unit.layer, "call", recording(unit)) for unit in units]):
        yield calls


def _one_tensor(output, layer):
    if not tf.is_tensor(output):
        raise ValueError(
            f"Layer '{layer.name}' ({type(layer).__name__}) must put out one tensor for "
            '`method="ghost"`: compile the model with `method="vectorized"`. Received: '
            f"{type(output).__name__}"
        )
    return tf.identity(output)


def _place():
    return tf.executing_eagerly() or id(tf.compat.v1.get_default_graph())


def _constant_weights(layer):
    variables = layer.trainable_variables
    values = [tf.stop_gradient(tf.convert_to_tensor(_keras.native(v))) for v in variables]
    return _keras.substituted(layer, list(zip(variables, values)))
