"""How the clipped sum is computed: which method, for which layer, and why.

    vectorized   every example a batch of its own, all in one vectorized graph
    loop         every example a batch of its own, one after another
    ghost        one real batch; norms from what layers were given and put out
    auto         ghost where the model allows it, else vectorized

All give the same sum, to rounding. Ghost needs a model whose every operation treats the
examples of a batch apart, and whose weights are used in their own layers only.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from dp2_keras import operations, per_example, validation
from dp2_keras.example_pass import ExamplePass
from dp2_keras.per_example import capture
from dp2_keras.per_example.ghost import contributions
from dp2_keras.per_example.layers import default_registry

STRATEGIES = {"ghost": per_example.ghost, "loop": per_example.loop, "vectorized": per_example.vectorized}
EACH_GRADIENT = {name: getattr(per_example.each, name) for name in STRATEGIES}
METHODS = ("auto", *STRATEGIES)


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """How one layer's part in the norms is found.

    Attributes:
        name: the layer's.
        kind: the layer's class.
        how: "formula", that of its kind, which for convolutions and dense layers over time makes gradients
            too, some examples at a time; or "made": its gradients are made by running it once more.
        why: the reason for the latter.
    """

    name: str
    kind: str
    how: str
    why: str = ""


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """What `model.privacy_plan()` gives; print it.

    Attributes:
        method: "ghost", "loop" or "vectorized".
        why: what led to it.
        layers: for ghost, a `LayerPlan` per layer with trainable weights.
    """

    method: str
    why: str
    layers: tuple[LayerPlan, ...] = ()

    def __str__(self):
        rows = [f"  {layer.name} ({layer.kind}): {layer.how} {layer.why}".rstrip() for layer in self.layers]
        return "\n".join([f"{self.method}: {self.why}", *rows])


def plan(model) -> PrivacyPlan:
    """Chooses by looking at the model and its `method`.

    Args:
        model: a private model, compiled.

    Raises:
        ValueError: if the method is "ghost" and the model may mix examples.
    """
    method = model.method
    if method in ("loop", "vectorized"):
        return PrivacyPlan(method, "as compiled")
    try:
        operations.check(model._loss_owner(), recurrent=True)
    except ValueError as error:
        reason = str(error).removesuffix(operations.ADVICE)
        if method == "ghost":
            raise ValueError(
                f'{reason} Compile the model with `method="auto"`, which gives each example a batch of its '
                "own where it must, or declare the class with `dp2_keras.declare_per_example` if you know "
                "better."
            ) from error
        return PrivacyPlan("vectorized", reason)
    units = capture.units(model, default_registry())
    return PrivacyPlan("ghost", _WHY_GHOST[method], tuple(_layer_plan(unit) for unit in units))


_WHY_GHOST = {
    "auto": "every operation is known to treat the examples of a batch apart",
    "ghost": "as compiled",
}


def confirmed(plan: PrivacyPlan, model, variables, data, examples) -> PrivacyPlan:
    """The plan, or vectorized where "auto" chose ghost and its pass cannot be traced.

    Args:
        plan: what `plan` gave.
        model: the model.
        variables, data, examples: what the pass is to run on.
    """
    if model.method != "auto" or plan.method != "ghost":
        return plan
    for tensor in tf.nest.flatten(data):
        if tensor is not None and None in tf.TensorShape(tensor.shape)[1:].as_list():
            return PrivacyPlan("vectorized", f"an input of shape {tensor.shape} has axes of unknown length")

    def trace(data, examples):
        return contributions(ExamplePass(model, variables, data), variables, examples)[-1]

    try:  # Not in an `init_scope`, which stops all tapes.
        tf.function(trace, autograph=False).get_concrete_function(*validation.specs_of((data, examples)))
    except ValueError as error:
        return PrivacyPlan("vectorized", str(error))
    return plan


def _layer_plan(unit):
    name, kind = unit.layer.name, type(unit.layer).__name__
    if unit.kind is not None:
        return LayerPlan(name, kind, "formula")
    return LayerPlan(name, kind, "made", f"({default_registry().why_not(unit.layer)})")
