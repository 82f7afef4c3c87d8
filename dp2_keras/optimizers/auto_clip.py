"""A clip norm that follows from the loss, which is public.

    C = 4 for squared errors, 0.3 for every other loss

An example's gradient is its error times its inputs. A classifier's errors end at 1, and a clip norm far
below makes all examples count alike, which classifiers like. The size of an error is what a mean is made of,
and is left alone where that can be: the gradient of (p - y)^2 is 2 (p - y) times the inputs, so that 4 cuts
errors of more than two, which are rare where y has a deviation of about 1 and the inputs a norm of 1.

C is a public number, that of the compiled loss, before any example is seen.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.optimizers.base import PrivateOptimizer

SQUARED_ERROR_CLIP = 4.0
CLIP = 0.3


def clip_norm(loss: Any) -> float:
    """C, for what `compile` is given as the loss.

    Args:
        loss: a name, a function, a Keras loss, or a nest of them; None for none.

    Returns:
        The clip norm of squared errors where there is one of them.

    Example:
    >>> clip_norm("mse"), clip_norm({"rating": "mse", "kind": "binary_crossentropy"}), clip_norm(None)
    (4.0, 4.0, 0.3)
    """
    return SQUARED_ERROR_CLIP if any(map(_is_squared_error, tf.nest.flatten(loss))) else CLIP


def _is_squared_error(loss):
    losses = _keras.keras.losses
    found = losses.get(loss) if isinstance(loss, str) else loss
    return found is losses.mean_squared_error or isinstance(found, losses.MeanSquaredError)


class AutoClip(PrivateOptimizer):
    """A clip norm that `compile` of a private model settles, once.

    Args:
        learning_rate: as in `PrivateOptimizer`.
        l2_norm_clip: C, or "auto".
        noise_multiplier: as in `PrivateOptimizer`.
        **kwargs: see `PrivateOptimizer`.
    """

    def __init__(self, learning_rate, l2_norm_clip, noise_multiplier, **kwargs):
        is_auto = isinstance(l2_norm_clip, str) and l2_norm_clip == "auto"
        super().__init__(learning_rate, CLIP if is_auto else l2_norm_clip, noise_multiplier, **kwargs)
        self._has_auto_clip, self._clip_is_settled = is_auto, False

    def settle_clip(self, loss):
        if not self._has_auto_clip:
            return
        clip = clip_norm(loss)
        if self._clip_is_settled and clip != self.l2_norm_clip:
            raise ValueError(
                '`l2_norm_clip="auto"` is settled by the first loss, because its steps are measured against '
                "it. For another loss, make a new optimizer, or give it a number. Received: "
                f"loss={loss}, which asks for {clip}, after {self.l2_norm_clip}"
            )
        vars(self)["l2_norm_clip"], self._clip_is_settled = clip, True  # Fixed for all others: `Configured`.

    def _argument(self, name):
        return "auto" if name == "l2_norm_clip" and self._has_auto_clip else super()._argument(name)
