"""Per-example gradients, clipped and summed, or of public data: how they are made, never what they are."""

from dp2_keras.per_example import each
from dp2_keras.per_example.chunks import PerExampleResult, batch_size, clipped_sum
from dp2_keras.per_example.ghost import ghost
from dp2_keras.per_example.loop import loop
from dp2_keras.per_example.vectorized import vectorized

__all__ = ["PerExampleResult", "batch_size", "clipped_sum", "each", "ghost", "loop", "vectorized"]
