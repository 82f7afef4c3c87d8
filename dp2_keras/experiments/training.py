"""A run becomes a row: train, evaluate a few times, price, and note what happened.

    row = the run's fields, its key, status, steps, epsilon at the task's delta, seconds,
          curve: [{epoch, step, train, test, train_loss, test_loss}], the last of which is the result

`fit` is called once, with one Keras epoch for each evaluation, because what happens between epochs
(accounting, callbacks) takes longer than a step; `steps_per_execution` divides them. An exception becomes a
row too.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import platform
import time
from typing import Any

import keras
import numpy as np

import dp2_keras as dp2
from dp2_keras.experiments import methods, probes, tasks
from dp2_keras.experiments.runs import Run

_MOST_STEPS_PER_EXECUTION = 64


def train(run: Run, directory: str | None = None) -> dict[str, Any]:
    """Trains and measures.

    Args:
        run: what to do.
        directory: where the data is; None downloads what can be.

    Returns:
        A row, with `status` "done", or "failed" and an `error`.
    """
    started = time.perf_counter()
    try:
        row = {"status": "done", **_trained(run, directory)}
    except Exception as error:  # A sweep goes on, and the table says what is missing.
        row = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - started
    return {"key": run.key, **run.as_dict(), **row, "seconds": round(seconds, 3), "versions": versions()}


def _trained(run, directory):
    _forget_models()
    keras.utils.set_random_seed(run.seed)
    task = tasks.get(run.task)
    method, data = methods.get(run.method), tasks.load(run.task, directory)
    data, public = data.split(method.public_fraction)
    steps = run.epochs * (data.size // run.batch_size)
    setting = methods.Setting(run.noise_multiplier, run.batch_size, run.seed, steps, data.size, public, task)
    watched = {name: probes.PROBES[name](data, task, run) for name in run.probes}
    model = _compiled(run, data, setting, one_by_one=any(probe.every_step for probe in watched.values()))
    curve = Curve(data, task.problem, run.epochs / steps)
    model.fit(*data.train, **_lengths(run, steps), callbacks=[curve, *watched.values()], verbose=0)
    return {
        "steps": int(model.optimizer.iterations),
        "epsilon": model.privacy_spent(task.delta),
        "delta": task.delta,
        "train_size": data.size,
        "test_size": len(data.test[1]),
        "curve": curve.points,
        "probes_found": {name: probe.found() for name, probe in watched.items()},
    }


def _forget_models():
    """Thousands of runs share a process."""
    keras.backend.clear_session()
    gc.collect()
    gc.freeze()  # TensorFlow frees no graph, and to look through all of them takes longer with each.


def _compiled(run, data, setting, one_by_one):
    model = dp2.make_private(setting.task.model(data))
    method = methods.get(run.method)
    optimizer = method.build(dict(run.hyper), setting)
    how = dict(
        method="ghost",
        steps_per_execution=1 if one_by_one else _divisor(setting.steps // run.points),
        public_data=setting.public,
        diagnostics=False,
    )
    model.compile(optimizer, setting.task.problem.loss(), **how)
    return model


def _divisor(steps):
    """The most steps that are taken at a time and end with the epoch."""
    return max(k for k in range(1, min(steps, _MOST_STEPS_PER_EXECUTION) + 1) if steps % k == 0)


def _lengths(run, steps):
    return {
        "batch_size": run.batch_size,
        "epochs": run.points,
        "steps_per_epoch": steps // run.points,
    }


class Curve(keras.callbacks.Callback):
    """Train and test metrics after each Keras epoch.

    Args:
        data: the task's.
        problem: what to compute.
        epochs_per_step: of the run, not of Keras.
    """

    def __init__(self, data, problem, epochs_per_step):
        super().__init__()
        self.points = []
        self._data, self._problem, self._epochs_per_step = data, problem, epochs_per_step

    def on_epoch_end(self, epoch, logs=None):
        """Evaluates on all examples."""
        step = int(self.model.optimizer.iterations)
        point = {"epoch": round(step * self._epochs_per_step, 6), "step": step}
        with np.errstate(all="ignore"):  # A run that diverged has metrics that are not numbers.
            for name, examples in (("train", self._data.train), ("test", self._data.test)):
                scores = self._problem.scores(self.model, *examples)
                point.update({name: float(scores["metric"]), f"{name}_loss": float(scores["loss"])})
        self.points.append(point)


@functools.lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """What ran: Python, and the libraries that a figure depends on."""
    names = ("tensorflow", "keras", "numpy", "scipy", "dp-accounting")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"dp2_keras": dp2.__version__, "python": platform.python_version(), **found}
