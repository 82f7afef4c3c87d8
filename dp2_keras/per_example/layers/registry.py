"""Which layers the ghost path has a formula for.

    registry.find(layer) -> a `LayerKind`, or None for a layer without one

A kind belongs to a class exactly, not to its subclasses, whose `call` may be another.
To add one: a file with its equation, a line in `default_registry`, a row in the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """How one class of layers contributes to the gradients of its weights.

    Attributes:
        weights: names of the attributes that hold the weights it accounts for.
        contributions: maps (layer, inputs, d) to a dict of name to `Contribution`; `inputs`
            is the first argument of the layer's call, and `d` the gradient at its output,
            before the activation.
        refuses: maps a layer to why it is not covered, or to None.
    """

    weights: tuple[str, ...]
    contributions: Callable
    refuses: Callable = lambda layer: None


class Registry:
    """Layer classes and their kinds."""

    def __init__(self):
        self._kinds = {}

    def register(self, layer_class: type, kind: LayerKind) -> None:
        """Adds a class, or gives it another kind."""
        self._kinds[layer_class] = kind

    def find(self, layer) -> LayerKind | None:
        """The kind of a layer, if all its trainable weights are accounted for."""
        return None if self.why_not(layer) else self._kinds[type(layer)]

    def why_not(self, layer) -> str | None:
        """Why a layer has no formula, or None if it has one."""
        kind = self._kinds.get(type(layer))
        if kind is None:
            return f"{type(layer).__name__} has no formula"
        held = [id(getattr(layer, name, None)) for name in kind.weights]
        for variable in layer.trainable_variables:
            if id(variable) not in held:
                return f"'{variable.name}' is not a weight that {type(layer).__name__} has a formula for"
        return kind.refuses(layer)
