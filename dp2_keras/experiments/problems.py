"""What a task asks for: a loss to train with, a metric to report, and predictors that know nothing.

    binary     sigmoid:  loss log(1 + e^z) - y z,            accuracy of z > 0
    classes    softmax:  loss log(sum_k e^z_k) - z_y,        accuracy of argmax z
    ratings    (p - r)^2, trained as half of it as in the authors' code, or as it is

Metrics are exact functions of the private data, over all of it; epsilon does not cover them. They are
computed here, those of linear models without Keras: the product of a sparse matrix and a kernel takes
milliseconds.
"""

from __future__ import annotations

import abc

import numpy as np
import scipy.special

_ROWS_AT_ONCE = 10_000


class Problem(abc.ABC):
    """Base class.

    Attributes:
        metric: its name.
        higher_is_better: the direction of the metric.
    """

    metric = "accuracy"
    higher_is_better = True

    @abc.abstractmethod
    def loss(self):
        """The Keras loss to train with."""

    @abc.abstractmethod
    def scores(self, model, x, y) -> dict[str, float]:
        """The metric and the loss of a model on all rows: {"metric": ..., "loss": ...}."""

    @abc.abstractmethod
    def trivial(self, train, test) -> dict[str, dict[str, float]]:
        """Predictors that a model must beat, by name: their metric on "train" and on "test"."""

    def is_better(self, value: float, other: float) -> bool:
        """Whether one value of the metric is better than another; NaN is worse than all."""
        if np.isnan(value) or np.isnan(other):
            return not np.isnan(value)
        return value > other if self.higher_is_better else value < other


class Binary(Problem):
    """Zeros and ones, by one logit."""

    def loss(self):
        import keras

        return keras.losses.BinaryCrossentropy(from_logits=True)

    def scores(self, model, x, y):
        z = _logits(model, x)[:, 0]
        return {"metric": np.mean((z > 0) == y), "loss": np.mean(np.logaddexp(0.0, z) - y * z)}

    def trivial(self, train, test):
        ones = np.mean(train[1]) > 0.5
        majority = {name: np.mean(y == ones) for name, (_, y) in _splits(train, test)}
        return {"majority class": majority, "naive Bayes (not private)": _naive_bayes(train, test)}


class Classes(Problem):
    """One of many classes, by as many logits."""

    def loss(self):
        import keras

        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def scores(self, model, x, y):
        parts = range(0, x.shape[0], _ROWS_AT_ONCE)
        sums = [self._sums(_logits(model, x[k : k + _ROWS_AT_ONCE]), y[k : k + _ROWS_AT_ONCE]) for k in parts]
        right, loss = np.sum(sums, axis=0) / x.shape[0]
        return {"metric": right, "loss": loss}

    def _sums(self, z, y):
        at_label = z[np.arange(len(y)), y]
        return np.sum(z.argmax(axis=1) == y), np.sum(scipy.special.logsumexp(z, axis=1) - at_label)

    def trivial(self, train, test):
        most = np.bincount(train[1]).argmax()
        return {"most frequent class": {name: np.mean(y == most) for name, (_, y) in _splits(train, test)}}


def half_squared_error(y_true, y_pred):
    """(p - r)^2 / 2 of each example."""
    import tensorflow as tf

    error = tf.reshape(y_pred, [-1]) - tf.reshape(tf.cast(y_true, y_pred.dtype), [-1])
    return 0.5 * tf.square(error)


class Ratings(Problem):
    """Numbers, by their squared error.

    Args:
        halved: whether half of it is the loss. Defaults to True.
    """

    metric = "MSE"
    higher_is_better = False

    def __init__(self, halved: bool = True):
        self._halved = halved

    def loss(self):
        return half_squared_error if self._halved else "mse"

    def scores(self, model, x, y):
        error = np.mean((np.ravel(model(_tensors(x))) - y) ** 2)
        return {"metric": error, "loss": 0.5 * error if self._halved else error}

    def trivial(self, train, test):
        mean = np.mean(train[1])
        means = {name: np.mean((y - mean) ** 2) for name, (_, y) in _splits(train, test)}
        return {"mean rating": means, "user and item means (not private)": _means(train, test)}


def _splits(train, test):
    return (("train", train), ("test", test))


def _logits(model, x):
    """Of a model of rows; of a linear one without Keras."""
    weights = model.get_weights()
    return x @ weights[0] + weights[1] if len(weights) == 2 else np.asarray(model(x))


def _tensors(x):
    import tensorflow as tf

    return [tf.convert_to_tensor(column) for column in x]


def _naive_bayes(train, test):
    """Bernoulli naive Bayes on the words that are there, smoothed by one."""
    x, y = train
    counts = np.array([(x[y == label] > 0).sum(axis=0).A1 for label in (0, 1)]) + 1.0
    odds = counts / (np.array([[np.sum(y == 0)], [np.sum(y == 1)]]) + 2.0)
    weights = np.diff(np.log(odds), axis=0)[0] - np.diff(np.log1p(-odds), axis=0)[0]
    bias = np.diff(np.log1p(-odds), axis=0).sum() + scipy.special.logit(np.mean(y))
    return {name: np.mean(((x > 0) @ weights + bias > 0) == y) for name, (x, y) in _splits(train, test)}


def _means(train, test):
    """The mean, and what each user and each item deviates from it, shrunk by 5 ratings."""
    (users, items), ratings = map(np.ravel, train[0]), train[1]
    mean = ratings.mean()
    of_item = _shrunk(items, ratings - mean)
    of_user = _shrunk(users, ratings - mean - of_item[items])
    guess = lambda x: mean + of_user[np.ravel(x[0])] + of_item[np.ravel(x[1])]  # noqa: E731
    return {name: np.mean((guess(x) - y) ** 2) for name, (x, y) in _splits(train, test)}


def _shrunk(groups, values, size=2000):
    return np.bincount(groups, values, size) / (np.bincount(groups, minlength=size) + 5.0)
