"""How a contender that trains by `model.fit` takes its turns, on Keras 2 and 3."""

from __future__ import annotations

import os
import time

import keras
import turns


class Timer(keras.callbacks.Callback):
    """Runs epochs as long as there are turns."""

    def __init__(self):
        super().__init__()
        self.turns = turns.Turns()

    def on_epoch_begin(self, epoch, logs=None):
        if not self.turns.may_begin():
            os._exit(0)

    def on_train_batch_end(self, batch, logs=None):
        if batch == turns.UNTIMED - 1:
            self.start = time.perf_counter()
        self.end = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.turns.ended((self.end - self.start) / (turns.STEPS - turns.UNTIMED))


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
        callbacks=[Timer()],
    )
