"""What a private run looks like, epoch by epoch, in TensorBoard.

    privacy/epsilon                   all that was spent so far
    privacy/phase                     the share of adaptive steps
    privacy/clipped_fraction          the share of examples with ||S g_i|| > C
    norms/q10 ... norms/q99           quantiles of ||S g_i||, to 5 %
    preconditioner/<variable>         histogram of sqrt(v): Figure 1 of arXiv:2212.00309

Epsilon and v are made of what was released. The clipped fraction and the norms are exact functions of
the private data, and not covered by epsilon: keep their logs where the data is kept.
"""

from __future__ import annotations

import os

import tensorflow as tf

from dp2_keras import _keras

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


class PrivacyTensorBoard(_keras.keras.callbacks.Callback):
    """Writes epsilon, phase, clipping and the preconditioner to TensorBoard after each epoch.

    Use it beside Keras's own `TensorBoard`, with the same directory.

    Args:
        log_dir: where to write. Defaults to "logs"; the files are in its folder `privacy`.

    Raises:
        ImportError: if TensorBoard is not installed.

    Example:
    >>> callback = PrivacyTensorBoard("logs")
    >>> callback.log_dir
    'logs'
    """

    def __init__(self, log_dir: str | os.PathLike = "logs"):
        super().__init__()
        self.log_dir = os.fspath(log_dir)
        self._writer = None

    def set_model(self, model):
        """Asks the model to keep the norms of an epoch."""
        super().set_model(model)
        if not hasattr(model, "ledger"):
            raise ValueError(
                "PrivacyTensorBoard needs a private model: wrap it with `dp2_keras.make_private(model)`. "
                f"Received: {type(model).__name__}"
            )
        model.collect_norms()

    def on_train_begin(self, logs=None):
        """Opens the file."""
        self._writer = tf.summary.create_file_writer(os.path.join(self.log_dir, "privacy"))

    def on_epoch_end(self, epoch, logs=None):
        """Writes what the epoch has shown."""
        with self._writer.as_default(step=epoch):
            for name in ("epsilon", "phase", "clipped_fraction"):
                if name in (logs or {}):
                    tf.summary.scalar(f"privacy/{name}", logs[name])
            for quantile, value in zip(QUANTILES, self.model.norm_quantiles(QUANTILES)):
                tf.summary.scalar(f"norms/q{100 * quantile:.0f}", value)
            for name, moment in self.model.optimizer.second_moments().items():
                tf.summary.histogram(f"preconditioner/{name}", tf.sqrt(moment))
        self._writer.flush()

    def on_train_end(self, logs=None):
        """Closes the file."""
        self._writer.close()
