"""What XLA compiles, and whether it compiles what is being traced.

The clipped sum is compiled where the model was compiled with `jit_compile=True`; the noise and the update
never are. Measured on two cores (docs/benchmarks.md), XLA takes twice as long for normals, three times for
convolutions, and one and a half times for a transformer block; it wins by a little where small products
dominate. So Keras's "auto", which is no XLA on a CPU, is right for all of it.

XLA fuses what TensorFlow runs one after another, and has no kernel for some of TensorFlow's operations that
save a copy: the few places that choose between them ask `is_compiling`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import tensorflow as tf

_state = threading.local()


def compiled(function: Callable) -> Callable:
    """A function of tensors, compiled by XLA.

    Example:
    >>> float(compiled(lambda x: x + float(is_compiling()))(tf.constant(1.0))), is_compiling()
    (2.0, False)
    """

    def traced(*args):
        with _compiling():
            return function(*args)

    return tf.function(traced, jit_compile=True, autograph=False)


def is_compiling() -> bool:
    """Whether what is traced now is for XLA."""
    return getattr(_state, "compiling", False)


@contextlib.contextmanager
def _compiling():
    before, _state.compiling = is_compiling(), True
    try:
        yield
    finally:
        _state.compiling = before
