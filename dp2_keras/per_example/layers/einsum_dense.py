"""EinsumDense, and MultiHeadAttention through the four it is made of: y = einsum(a, W) + b.

    g_W = sum_t a_t d_t^T

With the equation's letters: n the example; t those of a and y; the summed letters of a
and W; and the free letters of W and y. Covered where W is written [summed..., free...].
"""

from __future__ import annotations

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.per_example.contributions import Outer
from dp2_keras.per_example.layers import sums
from dp2_keras.per_example.layers.registry import LayerKind

_SPARE_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def letters(equation: str, rank: int) -> tuple[str, str, str]:
    """The letters of a, W and y, with those that an ellipsis stands for."""
    inputs, rest = equation.replace(" ", "").split(",")
    kernel, outputs = rest.split("->")
    elided = _SPARE_LETTERS[: rank - len(inputs.replace("...", ""))]
    return inputs.replace("...", elided), kernel, outputs.replace("...", elided)


def contributions(layer, inputs, d):
    """Those of the kernel and the bias."""
    in_letters, kernel, out_letters = letters(layer.equation, inputs.shape.rank)
    time = [c for c in in_letters[1:] if c in out_letters]
    summed = [c for c in kernel if c in in_letters]
    free = [c for c in kernel if c in out_letters]
    a, d_t = _arranged(inputs, in_letters, time, summed), _arranged(d, out_letters, time, free)
    found = {"kernel": Outer(a, d_t, layer.kernel.shape)}
    return found if layer.bias is None else {**found, "bias": sums.bias(d, layer.bias.shape)}


def _arranged(tensor, names, time, rest):
    """[n, time, rest] of a tensor whose axes have these names."""
    order = [0, *(names.index(c) for c in [*time, *rest])]
    sizes = [tensor.shape[axis] for axis in order]
    width = tf.TensorShape(sizes[1 + len(time) :]).num_elements()
    times = tf.TensorShape(sizes[1 : 1 + len(time)]).num_elements()
    shape = [tf.shape(tensor)[0], -1 if times is None else times, width]
    return tf.reshape(tf.transpose(tensor, order), shape)


def refuses(layer) -> str | None:
    """Equations that are not a product of matrices."""
    inputs, kernel, outputs = letters(layer.equation, len(layer.equation))
    summed = "".join(c for c in kernel if c in inputs and c not in outputs)
    free = "".join(c for c in kernel if c in outputs and c not in inputs)
    alone = [c for c in inputs if c not in kernel and c not in outputs]
    if kernel != summed + free or alone or inputs[0] != outputs[0]:
        return f"'{layer.equation}' is not a product of matrices, example by example"
    return None


def register(registry):
    """Adds `EinsumDense`, alone or within attention layers."""
    layer_class = _keras.keras.layers.EinsumDense
    registry.register(layer_class, LayerKind(("kernel", "bias"), contributions, refuses))
