"""One layer kind a file, each with the equation it satisfies."""

from dp2_keras.per_example.layers import (
    conv,
    dense,
    depthwise_conv,
    einsum_dense,
    embedding,
    normalization,
    separable_conv,
)
from dp2_keras.per_example.layers.registry import LayerKind, Registry

__all__ = ["LayerKind", "Registry", "default_registry"]


def default_registry() -> Registry:
    """A registry of all kinds in this package."""
    registry = Registry()
    for module in (dense, einsum_dense, embedding, conv, depthwise_conv, separable_conv, normalization):
        module.register(registry)
    return registry
