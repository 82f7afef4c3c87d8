"""Shared by all tests: one way to make logistic regression, and where the real data is."""

import gc
import json
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp2_keras as dp2
from dp2_keras import cli

# Two devices on one CPU, for tests of distribution strategies.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


def shared_path(*parts):
    """A file or directory that lies beside the project; the test is skipped where it does not."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path.name} is not beside the project, in {'/'.join(['shared', *parts[:-1]])}")
    return path


@pytest.fixture
def golden():
    """Trajectories of the authors' own code."""
    return json.loads(shared_path("golden", "paper_code.json").read_text())


@pytest.fixture
def run(capsys):
    """Runs the command `dp2`; its exit status, what it printed, and its errors."""

    def run(line, *paths):
        try:
            status = cli.main([*line.split(), *map(str, paths)])
        except SystemExit as stop:
            status = stop.code
        return (status, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def _fresh_keras(request):
    if hasattr(getattr(request, "module", None), "keras"):  # Else the test has nothing to do with it.
        keras.backend.clear_session()
        gc.collect()
        gc.freeze()  # TensorFlow frees no graph, and to look through hundreds of them takes seconds.
        keras.utils.set_random_seed(0)


def logistic_model(features, optimizer, **compile_arguments):
    """A compiled private logistic regression with zero weights."""
    model = dp2.DP2Sequential([keras.Input((features,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, **compile_arguments)
    return model


def flat_weights(model):
    """All trainable weights in one vector."""
    return np.concatenate([np.ravel(v.numpy()) for v in model.trainable_variables])


def fit_in_order(model, *data, **arguments):
    """Fits a private or a plain model on Keras's own batches, in the order of the data."""
    private = {"sampling": "shuffle"} if hasattr(model, "ledger") else {}
    return model.fit(*data, **{"shuffle": False, "verbose": 0, **private, **arguments})


def train(model, x, y, batches):
    """Runs `train_on_batch` over rows; the weights before each step and after the last."""
    path = [flat_weights(model)]
    for rows in batches:
        model.train_on_batch(x[rows], y[rows])
        path.append(flat_weights(model))
    return np.array(path)
