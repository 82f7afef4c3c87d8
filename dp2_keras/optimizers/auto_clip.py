"""A clip norm that follows from the loss, which is public.

    C = 4 / sqrt(k) for a mean squared error of k outputs, 0.3 for every other loss; the largest of several

An example's gradient is its error times its inputs. A classifier's errors end at 1, and a clip norm far
below makes all examples count alike, which classifiers like. The size of an error is what a mean is made of,
and is left alone where that can be: the gradient of sum_j (p_j - y_j)^2 / k in the outputs has a norm near
2 / sqrt(k) times the deviation of y and the norm of the inputs. So C is made for y of a deviation of about 1
and inputs of a norm of a few; 4 is the range of ratings, whose inputs have a norm of 1.4.

C is a public number, that of the compiled loss, before any example is seen.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

from dp2_keras import _checks, _keras
from dp2_keras.optimizers.base import PrivateOptimizer

SQUARED_ERROR_CLIP = 4.0
CLIP = 0.3


def clip_norm(losses: Sequence, shapes: Sequence[tuple] | None) -> float:
    """C, for a compiled model.

    Args:
        losses: of each output: a name, a function, a Keras loss, or its class; None for none. A single one
            is that of all outputs.
        shapes: of the outputs, with the batch's axis; None if they are not known.

    Raises:
        ValueError: if there is a squared error, and how many outputs it has is not known.

    Example:
    >>> clip_norm(["mse"], [(None, 1)]), clip_norm(["mse", "hinge"], [(None, 4), (None, 1)])
    (4.0, 2.0)
    """
    if not any(map(_is_squared_error, losses)):
        return CLIP
    if shapes is None or any(size is None for shape in shapes for size in shape[1:]):
        raise ValueError(
            '`l2_norm_clip="auto"` needs to know how many outputs a squared error is the mean of: begin '
            "the model with an `Input`, or give `l2_norm_clip` a number, 4 divided by the square root of how "
            f"many an example has. Received: outputs of shape {shapes}"
        )
    each = losses * len(shapes) if len(losses) == 1 else losses
    return max(_of_output(loss, math.prod(shape[1:])) for loss, shape in zip(each, shapes))


def _of_output(loss, size):
    return SQUARED_ERROR_CLIP / math.sqrt(size) if _is_squared_error(loss) else CLIP


def _is_squared_error(loss):
    losses = _keras.keras.losses
    found = losses.get(loss) if isinstance(loss, str) else loss
    kind = found if inspect.isclass(found) else type(found)
    return found is losses.mean_squared_error or issubclass(kind, losses.MeanSquaredError)


class AutoClip(PrivateOptimizer):
    """A clip norm that `compile` of a private model settles.

    Args:
        learning_rate: as in `PrivateOptimizer`.
        l2_norm_clip: C, or "auto".
        noise_multiplier: as in `PrivateOptimizer`.
        **kwargs: see `PrivateOptimizer`.
    """

    def __init__(self, learning_rate, l2_norm_clip, noise_multiplier, **kwargs):
        is_auto = l2_norm_clip == "auto"
        if isinstance(l2_norm_clip, str) and not is_auto:
            _checks.fail('a number, or "auto"', l2_norm_clip=l2_norm_clip)
        super().__init__(learning_rate, CLIP if is_auto else l2_norm_clip, noise_multiplier, **kwargs)
        self._has_auto_clip, self._clip_is_settled = is_auto, not is_auto

    def settle_clip(self, losses, shapes):
        if not self._has_auto_clip:
            return
        clip: Any = clip_norm(losses, shapes)
        if clip != self.l2_norm_clip and int(self.iterations.numpy()):
            raise ValueError(
                '`l2_norm_clip="auto"` is settled, because the steps so far were measured against it. For a '
                "loss that asks for another, make a new optimizer, or give it a number. Received: a loss "
                f"that asks for {clip:g}, after {self.l2_norm_clip:g}"
            )
        vars(self)["l2_norm_clip"], self._clip_is_settled = clip, True  # Fixed for all others: `Configured`.

    def _check_can_step(self, variables):
        super()._check_can_step(variables)
        if not self._clip_is_settled:
            raise ValueError(
                '`l2_norm_clip="auto"` is settled by `compile` of a private model, which says the loss: wrap '
                "the model with `dp2_keras.make_private(model)`, or give `l2_norm_clip` a number."
            )

    def _argument(self, name):
        return "auto" if name == "l2_norm_clip" and self._has_auto_clip else super()._argument(name)
