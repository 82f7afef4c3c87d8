"""The tasks, by name: where the data is, what model is trained on it, and the paper's setting.

`--data DIR` holds `imdb.npz`, `movielens-100k/u.data`, `mnist.npz` and `stackoverflow.npz` (a prepared file);
without it all but the last are downloaded. The synthetic reviews need no file.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from dp2_keras import _checks, data
from dp2_keras.data import download
from dp2_keras.experiments import problems

CONVEX_DELAYS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4)
FACTOR_DELAYS = (0.1, 0.5, 1, 3, 10, 25, 40)


@dataclasses.dataclass(frozen=True)
class Data:
    """Training and test examples: pairs (x, y), x a matrix, sparse or not, or a tuple of columns."""

    train: tuple
    test: tuple

    @property
    def size(self) -> int:
        """The number of training examples."""
        return len(self.train[1])

    def public_rows(self, fraction: float) -> int:
        """How many examples that share of the training examples is."""
        return round(fraction * self.size)

    def split(self, public_fraction: float) -> tuple[Data, tuple | None]:
        """Takes the first training examples out, as public ones; None for a fraction of 0."""
        count = self.public_rows(public_fraction)
        if not count:
            return self, None
        return Data(_rows(self.train, count, None), self.test), _rows(self.train, 0, count)


def _rows(pair, start, stop):
    x, y = pair
    cut = slice(start, stop)
    return (tuple(column[cut] for column in x) if isinstance(x, tuple) else x[cut]), y[cut]


@dataclasses.dataclass(frozen=True)
class Task:
    """A row of the registry.

    Args:
        title: for people.
        load: from the `--data` directory, or None, to `Data`.
        model: from `Data` to a Keras model.
        problem: loss, metric and trivial predictors.
        batch_size, epochs, noise_multiplier, delta: the paper's, or ours where it has none.
        delays: the grid of s, in epochs.
    """

    title: str
    load: Callable[[str | None], Data]
    model: Callable[[Data], Any]
    problem: problems.Problem
    batch_size: int
    epochs: int
    noise_multiplier: float
    delta: float
    delays: tuple[float, ...] = CONVEX_DELAYS


def get(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: if there is none.

    Example:
    >>> get("imdb").epochs
    100
    """
    _checks.one_of(tuple(TASKS), task=name)
    return TASKS[name]


@functools.lru_cache(maxsize=8)
def load(name: str, directory: str | None = None) -> Data:
    """The data of a task, which stays in memory.

    Raises:
        ValueError: if there is no such task, or it needs a directory.
        OSError: if a file cannot be read.
    """
    return get(name).load(directory)


# Data.


def _times(factor, *parts):
    """Longer rows; see docs/recipes.md."""
    return Data(*[(x if factor == 1 else factor * x, y) for x, y in parts])


def _imdb(features, times):
    def load(directory):
        return _times(times, *data.imdb(directory and os.path.join(directory, "imdb.npz"), features=features))

    return load


def _movielens(centre):
    def load(directory):
        parts = data.movielens(directory and os.path.join(directory, "movielens-100k"))
        return Data(*[((users[:, None], items[:, None]), y - centre) for (users, items), y in parts])

    return load


def _stackoverflow(features, times):
    def load(directory):
        if directory is None:
            _checks.fail("the directory of a prepared stackoverflow.npz (see BUILD.md)", data=directory)
        path = os.path.join(directory, "stackoverflow.npz")
        return _times(times, *data.stackoverflow(path, features=features))

    return load


@functools.lru_cache(maxsize=1)
def _digits(directory):
    """Rows of pixels from 0 to 1."""
    parts = _mnist_file(os.path.join(directory, "mnist.npz")) if directory else download.from_keras("mnist")
    pixels = lambda x: x.reshape(len(x), -1).astype("float32") / 255  # noqa: E731
    return Data(*[(pixels(x), y.astype("int32")) for x, y in parts])


def _mnist_file(path):
    with np.load(path) as file:
        return [(file[f"x_{part}"], file[f"y_{part}"]) for part in ("train", "test")]


def _synthetic(directory):
    import scipy.sparse

    del directory  # It is drawn, from a fixed seed.
    parts = data.synthetic_reviews(num_train=2_000, num_test=1_000, vocabulary_size=1_000)
    return Data(*[(scipy.sparse.csr_matrix(x), y) for x, y in parts])


# Models.


def _linear(outputs):
    def model(examples):
        from dp2_keras.experiments import models

        x, _ = examples.train
        return models.linear(x.shape[1], outputs, sparse=hasattr(x, "toarray"))

    return model


def _model(name, *arguments):
    def model(examples):
        from dp2_keras.experiments import models

        del examples
        return getattr(models, name)(*arguments)

    return model


_DIGITS = dict(load=_digits, problem=problems.Classes(), epochs=20, noise_multiplier=1.9736, delta=1e-5)


def _reviews(title, features, times=1):
    return Task(title, _imdb(features, times), _linear(1), problems.Binary(), 64, 100, 1.0, 1e-5)


def _tags(title, features, times=1):
    load, delays = _stackoverflow(features, times), (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)
    return Task(title, load, _linear(500), problems.Classes(), 64, 50, 1.0, 1e-6, delays)


_RATINGS = dict(problem=problems.Ratings(), epochs=50, noise_multiplier=0.5, delta=1e-6)


def _centred(title, *factors, **other):
    """Ratings less a public 3.5, by biases."""
    title, model = f"MovieLens-100k less 3.5, {title}", _model("biases", *factors)
    return Task(title, _movielens(3.5), model, batch_size=2000, delays=FACTOR_DELAYS, **{**_RATINGS, **other})


TASKS = {
    "imdb": _reviews("IMDB, words present", "binary"),
    "imdb-counts": _reviews("IMDB, word counts", "counts"),
    "imdb-frequencies": _reviews("IMDB, word frequencies", "frequencies"),
    "imdb-frequencies-times-80": _reviews("IMDB, word frequencies times 80", "frequencies", times=80),
    "imdb-tfidf": _reviews("IMDB, tf-idf (weights fitted on the training reviews)", "tfidf"),
    "imdb-tfidf-times-5": _reviews("IMDB, tf-idf times 5", "tfidf", times=5),
    "stackoverflow-subset": _tags("Stack Overflow, a prepared file, words present", "binary"),
    "stackoverflow-subset-frequencies": _tags("Stack Overflow, a prepared file, frequencies", "frequencies"),
    "stackoverflow-subset-frequencies-times-20": _tags(
        "Stack Overflow, a prepared file, frequencies times 20", "frequencies", times=20
    ),
    "movielens": Task(
        "MovieLens-100k, the paper's factors",
        _movielens(0.0),
        _model("factors", 100),
        batch_size=64,
        delays=FACTOR_DELAYS,
        **_RATINGS,
    ),
    "movielens-biases": _centred("user and item biases"),
    "movielens-biases-mse": _centred(
        "user and item biases, loss mse", problem=problems.Ratings(halved=False)
    ),
    "movielens-factors": _centred("biases and 8 factors", 8),
    "mnist": Task("MNIST, linear", model=_linear(10), batch_size=2048, **_DIGITS),
    "mnist-network": Task(
        "MNIST, 64 hidden units", model=_model("network", 784, 64, 10), batch_size=2048, **_DIGITS
    ),
    "synthetic": Task(
        "Synthetic reviews", _synthetic, _linear(1), problems.Binary(), 50, 6, 1.0, 1e-4, (0.1, 0.25, 0.5, 1)
    ),
}
