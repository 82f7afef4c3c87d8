"""What figures need besides metrics, taken while a run runs. Exact figures of the data, for the reader alone.

    second_moments   histogram of log10(sqrt(v) + eps) after each evaluation
    staleness        h(s) >= max_t E||g^t||_1 / (E||G/s||_1 + d eps)     (arXiv:2212.00309, "Convex Cases")

g^t is the mean gradient of a mini-batch at the weights of step t, without clip and noise; G/s is the mean
that v was last refreshed from. It is recovered from v itself: m^2 = (v - rho v_before) / (1 - rho).
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from dp2_keras import _keras

BINS = np.round(np.arange(-9.0, 3.0001, 0.1), 6)


class Probe(keras.callbacks.Callback):
    """Base class.

    Args:
        data, task, run: what is trained.
    """

    every_step = False

    def __init__(self, data, task, run):
        super().__init__()
        self._data, self._task, self._run = data, task, run
        self._found = []

    def found(self) -> list[dict]:
        """What was measured, as JSON can hold it."""
        return self._found

    def _second_moment(self):
        moments = self.model.optimizer.second_moments().values()
        return np.concatenate([np.ravel(v.numpy()).astype(np.float64) for v in moments])


class SecondMoments(Probe):
    """Histograms of the preconditioner's values."""

    def on_epoch_end(self, epoch, logs=None):
        """Counts, by decades."""
        values = np.log10(np.sqrt(self._second_moment()) + self.model.optimizer.eps)
        counts, _ = np.histogram(np.clip(values, BINS[0], BINS[-1]), BINS)
        self._found.append({"step": int(self.model.optimizer.iterations), "counts": counts.tolist()})


class Staleness(Probe):
    """||G/s||_1 at each refresh, and the largest ||g||_1 of a few mini-batches until the next."""

    every_step = True

    def on_train_begin(self, logs=None):
        """Starts, before the first refresh."""
        self._rng = np.random.default_rng(self._run.seed)
        self._before = self._second_moment()
        self._cycle = sum(vars(self.model.optimizer.schedule).values())

    def on_train_batch_end(self, batch, logs=None):
        """Notes a refresh, and gradients half a cycle and a cycle after it."""
        step, optimizer = int(self.model.optimizer.iterations), self.model.optimizer
        since = (step - optimizer.schedule.sgd_steps) % self._cycle
        if since == 0:
            self._found.append({"step": step, "mean": self._refreshed(optimizer), "gradients": []})
        if self._found and since in (0, self._cycle // 2, self._cycle - 1):
            self._found[-1]["gradients"].append(self._gradient_norm())

    def _refreshed(self, optimizer):
        """||G/s||_1 + d eps."""
        after = self._second_moment()
        squares = np.maximum(after - optimizer.rho * self._before, 0.0) / (1.0 - optimizer.rho)
        self._before = after
        return float(np.sum(np.sqrt(squares) + optimizer.eps))

    def _gradient_norm(self):
        x, y = self._data.train
        rows = np.sort(self._rng.choice(len(y), self._run.batch_size, replace=False))
        with tf.GradientTape() as tape:
            outputs = self.model(_batch(x, rows), training=True)
            loss = tf.reduce_mean(self._task.problem.loss()(y[rows, None], outputs))
        sources = [_keras.native(v) for v in self.model.trainable_variables]
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, sources)]
        return float(sum(np.abs(g).sum() for g in gradients))


def _batch(x, rows):
    if isinstance(x, tuple):
        return [tf.convert_to_tensor(column[rows]) for column in x]
    taken = x[rows].tocoo()
    return tf.SparseTensor(np.stack([taken.row, taken.col], axis=1), taken.data, taken.shape)


PROBES = {"second_moments": SecondMoments, "staleness": Staleness}
