"""What a private step looks like from inside, for the fit log.

    phase             the share of adaptive steps
    clipped_fraction  the share of examples with ||S g_i|| > C
    scaled_norm       the mean of ||S g_i||

Exact functions of the private data, like every training metric: epsilon does not cover
them. Switch them off with `compile(diagnostics=False)` where the log is published.
"""

import tensorflow as tf

from dp2_keras import _keras


class Diagnostics:
    """Means over an epoch. Not tracked by the model, so that validation has none."""

    def __init__(self):
        names = ("phase", "clipped_fraction", "scaled_norm")
        self._means = {name: _keras.keras.metrics.Mean(name=name) for name in names}

    def update(self, phase, norms, l2_norm_clip):
        """Adds one step: its phase, its examples' norms and the clip norm."""
        clipped = tf.cast(norms > tf.cast(l2_norm_clip, norms.dtype), norms.dtype)
        self._means["phase"].update_state(phase)
        self._means["clipped_fraction"].update_state(clipped)
        self._means["scaled_norm"].update_state(norms)

    def result(self):
        """The means so far, by name."""
        return {name: mean.result() for name, mean in self._means.items()}

    def reset(self):
        """Starts an epoch."""
        for mean in self._means.values():
            mean.reset_state()
