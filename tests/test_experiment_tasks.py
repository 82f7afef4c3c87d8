"""Methods, tasks and problems: what can be run, and how it is scored."""

import dataclasses

import numpy as np
import pytest
from experiment_cases import RUN, SETTING

from dp2_keras.experiments import methods, problems, search, tasks


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_builds_at_points_of_its_grid(name):
    method = methods.get(name)
    setting = dataclasses.replace(SETTING, noise_multiplier=1.0 if method.is_private else 0.0)
    grid = methods.grid(name, setting.task, 40, methods.limits(name, steps=240, public_rows=10))
    for point in search.candidates(grid, 3):
        optimizer = method.build(point, setting)
        config = optimizer.get_config()
        assert config["noise_seed"] == 0 and config["noise_multiplier"] == setting.noise_multiplier
        assert all(config[key] == pytest.approx(value) for key, value in point.items())


@pytest.mark.parametrize("name", [name for name in methods.METHODS if "eps" in methods.get(name).space])
def test_every_method_takes_the_least_eps(name):
    point = {key: values[0] if values else 2 for key, values in methods.get(name).space.items()}
    optimizer = methods.get(name).build({**point, "eps": methods.LEAST_EPS}, SETTING)
    assert optimizer.eps == methods.LEAST_EPS


WITH_PUBLIC_DATA = {
    "AdaDPSRMSprop": {"learning_rate": 1.0, "l2_norm_clip": 5.0, "eps": 1e-3},
    "AdaDPSAdagrad": {"learning_rate": 1.0, "l2_norm_clip": 5.0, "eps": 1e-3},
    "PDADPMD": {"learning_rate": 4.0, "l2_norm_clip": 0.5},
    "DPAdagradPublicSubspace": {"learning_rate": 1.0, "l2_norm_clip": 0.5, "eps": 0.1, "subspace_size": 5},
}


@pytest.mark.parametrize("method", [name for name in methods.METHODS if methods.get(name).public_fraction])
def test_a_method_with_public_data_trains_on_the_other_examples(method):
    from dp2_keras.experiments import training

    row = training.train(dataclasses.replace(RUN, method=method, hyper=WITH_PUBLIC_DATA[method]))
    assert row["status"] == "done", row.get("error")
    assert row["train_size"] == 1980 and row["steps"] == 9 and row["curve"][-1]["train"] > 0.4


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="`method` must be one of 'SGD'.* Received: method='Nadam'"):
        methods.get("Nadam")
    with pytest.raises(ValueError, match="`task` must be one of 'imdb'.* Received: task='cifar'"):
        tasks.get("cifar")


def test_public_examples_are_taken_out_of_training():
    columns = tuple(np.arange(10) + k for k in (0, 100))
    data = tasks.Data((columns, np.arange(10.0)), (columns, np.arange(10.0)))
    private, public = data.split(0.2)
    assert (
        private.size == 8
        and list(public[1]) == [0.0, 1.0]
        and list(private.train[0][1]) == list(range(102, 110))
    )
    assert data.split(0.0) == (data, None)


def test_stack_overflow_says_what_it_needs():
    with pytest.raises(ValueError, match="`data` must be the directory of a prepared stackoverflow.npz"):
        tasks.load("stackoverflow-subset", None)


@pytest.fixture
def digits(tmp_path):
    """A directory with a file like MNIST's, in which a bright row of pixels is the label."""
    y = np.arange(200, dtype=np.uint8) % 10
    x = np.zeros((200, 28, 28), np.uint8)
    x[np.arange(200), 2 * y] = 255
    np.savez(tmp_path / "mnist.npz", x_train=x, y_train=y, x_test=x[:50], y_test=y[:50])
    return str(tmp_path)


def test_digits_are_rows_of_pixels_from_a_file_or_from_keras(digits, monkeypatch):
    import keras

    from_file = tasks.load("mnist", digits)
    (x, y), (x_test, _) = from_file.train, from_file.test
    assert x.shape == (200, 784) and x_test.shape == (50, 784) and x.max() == 1.0 and y[13] == 3
    parts = [(part[0].reshape(-1, 28, 28) * 255, part[1]) for part in (from_file.train, from_file.test)]
    monkeypatch.setattr(keras.datasets.mnist, "load_data", lambda: parts)
    np.testing.assert_array_equal(tasks.get("mnist").load(None).train[0], x)


@pytest.mark.parametrize("task", ["mnist", "mnist-network"])
def test_a_model_of_digits_learns_them(task, digits):
    from dp2_keras.experiments import training

    hyper = {"learning_rate": 1.0, "l2_norm_clip": 1.0}
    run = dataclasses.replace(RUN, task=task, hyper=hyper, epochs=20, batch_size=20, noise_multiplier=0.1)
    row, again = (training.train(run, digits) for _ in range(2))
    assert row["status"] == "done", row.get("error")
    assert row["curve"][-1]["test"] == 1.0
    assert row["curve"] == again["curve"]  # A run's seed decides where a network starts.


class Linear:
    def __init__(self, kernel, bias):
        self._weights = np.array(kernel), np.array(bias)

    def get_weights(self):
        return self._weights


def test_scores_are_those_of_the_equations():
    scores = problems.Binary().scores(Linear([[1.0], [-1.0]], [0.5]), np.eye(2), np.array([1.0, 1.0]))
    assert scores["metric"] == 0.5
    assert scores["loss"] == pytest.approx(np.mean(np.log1p(np.exp([-1.5, 0.5]))))
    model = Linear([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]], np.zeros(3))
    scores = problems.Classes().scores(model, np.eye(2), np.array([1, 1]))
    expected = [np.log(np.e + np.e**2 + 1) - 2, np.log(1 + np.e + np.e**3) - 1]
    assert scores["metric"] == 0.5 and scores["loss"] == pytest.approx(np.mean(expected))
    model = lambda columns: columns[0] + columns[1]  # noqa: E731
    scores = problems.Ratings().scores(model, (np.ones((2, 1)), np.ones((2, 1))), np.array([1.0, 5.0]))
    assert scores == {"metric": pytest.approx(5.0), "loss": pytest.approx(2.5)}


def test_trivial_predictors_of_ratings():
    columns, ratings = (np.array([[0], [1]]), np.array([[5], [5]])), np.array([1.0, 5.0])
    found = problems.Ratings().trivial((columns, ratings), (columns, ratings))
    assert found["mean rating"] == {"train": 4.0, "test": 4.0}
    # One rating each, shrunk by 5: a user deviates by 2 / 6 from the item's mean, 3.
    assert found["user and item means (not private)"]["test"] == pytest.approx((2 - 2 / 6) ** 2)


@pytest.mark.parametrize(
    "name, loader, total",
    [
        ("imdb-tfidf", "imdb", 1),
        ("imdb-tfidf-times-5", "imdb", 5),
        ("imdb-frequencies-times-80", "imdb", 80),
        ("stackoverflow-subset-frequencies", "stackoverflow", 1),
        ("stackoverflow-subset-frequencies-times-20", "stackoverflow", 20),
    ],
)
def test_short_rows_are_made_longer(name, loader, total, monkeypatch):
    parts = [(np.full((2, 4), 0.25, np.float32), np.array([0, 1]))] * 2
    monkeypatch.setattr(tasks.data, loader, lambda path, features: parts)
    x, y = tasks.get(name).load("anywhere").train
    np.testing.assert_array_equal(x.sum(axis=1), total)
    np.testing.assert_array_equal(y, [0, 1])
