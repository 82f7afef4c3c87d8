"""Importing the package, training, saving and loading open no connection and unpickle nothing."""

import subprocess
import sys
import textwrap

import pytest

WATCH = """
import sys

WATCHED = "socket.connect socket.getaddrinfo socket.gethostbyname urllib.Request pickle.find_class".split()
seen = []
sys.addaudithook(lambda event, arguments: seen.append(event) if event in WATCHED else None)
"""
USE = """
import os
import tempfile

import keras
import numpy as np

import dp2_keras as dp2

model = dp2.DP2Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(dp2.DP2RMSprop(0.1, 1.0, noise_multiplier=1.0, delay=1, expected_batch_size=2), loss="mse")
model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
with tempfile.TemporaryDirectory() as directory:
    file, weights = (os.path.join(directory, name) for name in ("model.keras", "model.weights.h5"))
    model.save(file)
    model.save_weights(weights)
    keras.models.load_model(file).load_weights(weights)
    print(model.privacy_statement(1e-3))
"""


def events(program):
    """The watched events of a new process."""
    script = f"{WATCH}\n{textwrap.dedent(program)}\nprint('SEEN', *seen)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


def test_no_connection_and_no_pickle():
    assert events(USE) == []


@pytest.mark.parametrize(
    "program, event",
    [
        ("import collections, pickle; pickle.loads(pickle.dumps(collections.Counter))", "pickle.find_class"),
        ("import socket; socket.getaddrinfo('127.0.0.1', 9)", "socket.getaddrinfo"),
    ],
)
def test_the_watch_sees_them(program, event):
    assert event in events(program)
