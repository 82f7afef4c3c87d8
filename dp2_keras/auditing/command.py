"""`dp2 audit`: the worst case of a saved model's training step, on made-up examples."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dp2_keras import _keras
from dp2_keras.auditing.attack import audit
from dp2_keras.auditing.result import Audit

keras = _keras.keras

_ORDINARY = 16  # Examples that are no canaries: the worst case does not depend on them.


def run(arguments) -> Audit:
    """Loads a model and audits it.

    Args:
        arguments: of the command line.

    Returns:
        What the audit found; also drawn to `arguments.plot` if that is given.

    Raises:
        ValueError: if the file is not a model that can be audited.
        OSError: if it cannot be read.
    """
    model = keras.models.load_model(arguments.file)
    x, y = made_up(model)
    terms = {
        name: getattr(arguments, name) for name in ("batch_size", "epochs", "num_canaries", "confidence")
    }
    found = audit(model, x, y, delta=arguments.delta, **terms)
    if arguments.plot:
        found.plot().figure.savefig(arguments.plot)
    return found


def made_up(model, count: int = _ORDINARY):
    """Examples of the shapes that a model wants: zeros, which every loss takes.

    Args:
        model: compiled, with known inputs.
        count: how many.

    Returns:
        x and y.
    """
    x = [np.zeros([count, *_sizes(t)], tf.as_dtype(t.dtype).as_numpy_dtype) for t in model.inputs or []]
    is_sparse = "sparse" in _name(model.loss)
    y = np.zeros([count] if is_sparse else [count, *_sizes(model.outputs[0])], np.float32)
    return (x[0] if len(x) == 1 else x), y


def _sizes(tensor):
    """Of all axes but the first; 1 where any will do."""
    return [size or 1 for size in tensor.shape[1:]]


def _name(loss):
    named = loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", ""))
    return named.lower()
