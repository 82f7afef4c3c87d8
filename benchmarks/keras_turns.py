"""How a contender that trains by `model.fit` takes its turns, on Keras 2 and 3."""

from __future__ import annotations

import os
import time

import keras
import turns


class Turns(keras.callbacks.Callback):
    """Runs an epoch for each turn, after two that compile."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            turns.tell(ready=True)
        if epoch >= 2 and not turns.wait():
            turns.tell(peak_mb=turns.peak_mb())
            os._exit(0)

    def on_train_batch_end(self, batch, logs=None):
        if batch == turns.UNTIMED - 1:
            self.start = time.perf_counter()
        self.end = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        if epoch >= 2:
            turns.tell(seconds=(self.end - self.start) / (turns.STEPS - turns.UNTIMED))


def fit(model, workload) -> None:
    """Trains a compiled model on a workload until the runner ends it."""
    x, y = workload.data()
    model.fit(
        x,
        y,
        batch_size=workload.batch_size,
        epochs=10**6,
        steps_per_epoch=turns.STEPS,
        verbose=0,
        callbacks=[Turns()],
    )
