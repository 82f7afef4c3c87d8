"""The experiments: quick reproductions on embedded data, that resume, and choose by training metrics."""

import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from dp2_keras import cli
from dp2_keras.experiments import configuration as configurations
from dp2_keras.experiments import methods, pool, problems, report, reproduce, search, summary, tasks
from dp2_keras.experiments.progress import Progress, duration
from dp2_keras.experiments.runs import Run
from dp2_keras.experiments.store import Store

SGD = {"learning_rate": 4.0, "l2_norm_clip": 0.5}
TABLES = ["ablations", "main", "practical"]
RUN = Run("synthetic", "DPSGD", SGD, seed=0, epochs=1, batch_size=200, noise_multiplier=1.0)
SETTING = methods.Setting(1.0, 50, 0, 10, 500, None, tasks.get("synthetic"))


def without_times(row):
    return {name: value for name, value in row.items() if name != "seconds"}


# Runs.


def test_a_key_is_the_same_on_every_machine_for_ever():
    assert RUN.key == "bf46b7df5223c609"
    assert Run.from_dict(json.loads(json.dumps({**RUN.as_dict(), "status": "done"}))) == RUN


def test_a_key_changes_with_all_that_a_row_depends_on():
    changes = dict(
        task="imdb", method="DPAdam", hyper={**SGD, "l2_norm_clip": 1.0}, seed=1, epochs=2, batch_size=100
    )
    changes.update(noise_multiplier=2.0, evaluations=2, probes=("second_moments",))
    assert set(changes) == {field.name for field in dataclasses.fields(Run)}
    keys = {dataclasses.replace(RUN, **{name: value}).key for name, value in changes.items()}
    assert len(keys | {RUN.key}) == len(changes) + 1


def test_a_key_does_not_depend_on_spelling():
    for hyper in ({"l2_norm_clip": 0.5, "learning_rate": 4}, {"l2_norm_clip": 0.5, "learning_rate": 4.0}):
        assert dataclasses.replace(RUN, hyper=hyper, noise_multiplier=1).key == RUN.key


@pytest.mark.parametrize("epochs, evaluations, points", [(100, 10, 10), (30, 20, 15), (7, 5, 1), (6, 6, 6)])
def test_evaluations_divide_the_epochs(epochs, evaluations, points):
    assert dataclasses.replace(RUN, epochs=epochs, evaluations=evaluations).points == points


@pytest.mark.parametrize("change", [{"seed": -1}, {"epochs": 0}, {"batch_size": 0}, {"noise_multiplier": -1}])
def test_a_run_out_of_range_is_refused(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"`{name}` must be .* Received: {name}={value}"):
        dataclasses.replace(RUN, **change)


# Store.


def test_a_store_keeps_the_last_row_of_a_key_and_forgets_half_a_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Store(path) as store:
        store.add({"key": "a", "status": "failed"})
        store.add({"key": "a", "status": "done", "epsilon": math.inf})
        store.add({"key": "b", "status": "failed"})
    with open(path, "ab") as file:
        file.write(b'{"key": "c", "sta')
    with Store(path) as store:
        assert set(store.rows) == {"a", "b"} and float(store.rows["a"]["epsilon"]) == math.inf
        assert store.has("b") and not store.has("b", retry_failed=True) and not store.has("c")
        assert [row["key"] for row in store.of(["b", "a", "c"])] == ["a"]
        store.add({"key": "c", "status": "done"})
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "a", "b", "c"]


def test_a_damaged_store_and_two_sweeps_at_once_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("nonsense\n{}\n")
    with pytest.raises(ValueError, match="rows.jsonl is damaged in line 1"), Store(path):
        pass
    path.write_text("")
    with Store(path), pytest.raises(OSError, match="in use by another sweep"), Store(path):
        pass


# Search.


GRID = {"a": list(range(10)), "b": [0.1, 0.2, 0.3]}


def test_candidates_are_points_of_the_grid_without_twins_and_the_same_every_time():
    points = search.candidates(GRID, 20)
    assert points == search.candidates(GRID, 20) != search.candidates(GRID, 20, seed=1)
    assert len({tuple(point.items()) for point in points}) == 20
    assert all(point["a"] in GRID["a"] and point["b"] in GRID["b"] for point in points)
    assert len(search.candidates(GRID, 100)) == 30
    assert points[:2] == [{"a": 8, "b": 0.1}, {"a": 6, "b": 0.1}]


def candidate_row(a, train, test=0.0):
    return {"hyper": {"a": a, "b": 0.2}, "curve": [{"train": 0.0}, {"train": train, "test": test}]}


def test_the_winner_has_the_best_training_metric_whatever_test_says():
    rows = [candidate_row(3, 0.8, test=0.9), candidate_row(4, 0.9, test=0.1), candidate_row(5, "nan")]
    choice = search.choose(rows, problems.Binary(), GRID, runs=4)
    assert choice == search.Choice({"a": 4, "b": 0.2}, runs=4, failed=2, train=0.9, edges=())
    assert search.choose(rows, problems.Ratings(), GRID, runs=3).hyper["a"] == 3
    assert search.choose([candidate_row(5, "nan")], problems.Ratings(), GRID, runs=1) is None


def test_the_best_third_survives_a_round_of_halving():
    rows = [candidate_row(a, train) for a, train in enumerate([0.5, "nan", 0.9, 0.7])]
    assert [hyper["a"] for hyper in search.survivors(rows, problems.Binary())] == [2, 3]
    assert [hyper["a"] for hyper in search.survivors(rows, problems.Ratings())] == [0, 3]
    assert search.survivors(rows[1:2], problems.Binary()) == []


def test_a_winner_on_an_edge_is_flagged():
    assert search.choose([candidate_row(9, 0.8)], problems.Binary(), GRID, 1).edges == ("a",)
    assert search.edges({"a": 0, "b": 0.3}, GRID) == ("a", "b")
    assert search.edges({"a": 5}, {"a": [5]}) == ()


@pytest.mark.parametrize("method", [name for name in methods.METHODS if methods.get(name).space])
def test_a_grid_is_large_enough_for_sixty_runs_and_as_wide_as_the_papers(method):
    for name in ("imdb", "movielens"):
        grid = methods.grid(method, tasks.get(name), 390)
        if method not in ("SGD",):
            assert math.prod(len(values) for values in grid.values()) >= 60
        assert all(values == sorted(set(values)) for values in grid.values())
    assert {0.03, 0.1, 0.3, 1, 3} <= set(grid.get("learning_rate", [0.03, 0.1, 0.3, 1, 3]))
    assert {0.1, 0.25, 0.5, 1} <= set(grid.get("l2_norm_clip", [0.1, 0.25, 0.5, 1]))
    assert {1e-2, 1e-3, 1e-5, 1e-7} <= set(grid.get("eps", [1e-2, 1e-3, 1e-5, 1e-7]))


def test_delays_are_steps_of_the_tasks_epochs():
    assert {195, 390, 780} <= set(methods.grid("DP2RMSprop", tasks.get("imdb"), 390)["delay"])
    assert methods.grid("DP2RMSprop", tasks.get("imdb"), 12)["delay"] == [1, 3, 6, 12, 24, 48]
    assert min(methods.grid("DP2RMSpropExtraQuery", tasks.get("imdb"), 12)["delay"]) == 2
    assert methods.grid("DPSGD", tasks.get("imdb"), 12, learning_rate=[7])["learning_rate"] == [7]


# Methods and tasks.


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_builds_at_points_of_its_grid(name):
    method = methods.get(name)
    setting = dataclasses.replace(SETTING, noise_multiplier=1.0 if method.is_private else 0.0)
    for point in search.candidates(methods.grid(name, setting.task, 40), 3):
        optimizer = method.build(point, setting)
        config = optimizer.get_config()
        assert config["noise_seed"] == 0 and config["noise_multiplier"] == setting.noise_multiplier
        assert all(config[key] == pytest.approx(value) for key, value in point.items())


WITH_PUBLIC_DATA = {
    "AdaDPSRMSprop": {"learning_rate": 1.0, "l2_norm_clip": 5.0, "eps": 1e-3},
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
    row = training.train(run, digits)
    assert row["status"] == "done", row.get("error")
    assert row["curve"][-1]["test"] == 1.0


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


# Configurations.


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", configurations.names())
def test_a_configuration_is_valid_and_names_what_there_is(name, quick):
    found = configurations.load(name, quick)
    assert found.cases and (found.plot or found.kind == "table")
    for case in found.cases:
        assert case.task in tasks.TASKS and case.method in methods.METHODS
        assert quick == (case.task == "synthetic")
        assert case.hyper is not None or not quick
        assert (case.noise_multiplier is None) == (case.match is not None)


def test_every_table_and_figure_of_the_paper_is_there():
    figures = "compute curves delay nonprivate preconditioner staleness tradeoff".split()
    assert configurations.names("figure") == figures and configurations.names("table") == TABLES


def test_the_papers_figures_are_as_printed():
    cases = {(case.task, case.method): case for case in configurations.load("main").cases}
    best = cases["imdb", "DP2RMSprop"]
    assert best.paper == [0.815, 0.011] and best.source == "paper"
    assert best.hyper == dict(
        sgd_learning_rate=0.1, learning_rate=3, sgd_l2_norm_clip=0.5, l2_norm_clip=5, eps=1e-7, delay=195
    )
    assert cases["movielens", "DPSGD"].hyper == {"learning_rate": 0.1, "l2_norm_clip": 1}
    assert cases["imdb", "DPAdam"].hyper is None


@pytest.mark.parametrize(
    "change, words",
    [
        ({"plot": "pie"}, "`plot` must be one of"),
        ({"kind": "poem"}, "`kind` must be one of"),
        ({"seeds": 0}, "`seeds` must be a positive integer"),
        ({"colour": "red"}, "must have keys of"),
    ],
)
def test_a_wrong_configuration_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        configurations.parse("main", {**configurations.document("main"), **change})


# Words.


def test_progress_tells_the_time_that_is_left(capsys):
    now = [0.0]
    progress = Progress(4, work=40.0, clock=lambda: now[0])
    now[0] = 10.0
    progress.add(10.0)
    progress.add(10.0, failed=True)
    assert progress.line() == "[############------------] 2/4 runs, 1 failed, 10 s left"
    assert duration(3599) == "59 min 59 s"


def test_mean_and_deviation():
    assert summary.spread([2.0]) == {"mean": 2.0, "deviation": None}
    assert math.isnan(summary.spread([1.0, "nan"])["mean"])


def result(**changes):
    fields = dict(method="DPSGD", varied={}, noise_multiplier=1.0, hyper={"learning_rate": 5}, source="paper")
    fields.update(search=None, paper=[0.687, 0.018], seeds=5, errors=[], epsilon=3.03051, steps=39000)
    fields.update(train={"mean": 0.9, "deviation": 0.01}, test={"mean": 0.8564, "deviation": 0.002}, curve=[])
    return {**fields, **changes}


def report_of(*results):
    setting = dict(
        task="imdb", label="IMDB", task_title="IMDB", metric="accuracy", higher_is_better=True, epochs=100
    )
    setting.update(batch_size=64, train_size=25000, test_size=25000, delta=1e-5)
    setting.update(trivial={"majority class": {"train": 0.5, "test": 0.5}}, results=list(results))
    whole = dict(name="main", title="Main", source="Table 2", plot=None, search=60, seeds=5)
    return [{**whole, "versions": {"keras": "3"}, "settings": [setting]}]


def rendered(*results):
    return report.render(report_of(*results))


def test_the_report_has_the_numbers_beside_the_papers():
    text = rendered(result(search={"runs": 60, "failed": 2, "edges": ["learning_rate"]}))
    line = next(line for line in text.splitlines() if line.startswith("| DPSGD"))
    for words in ("3.0305", "0.900 ± 0.010", "0.856 ± 0.002", "0.687 ± 0.018", "39,000", "learning_rate 5"):
        assert words in line
    assert "60, 2 without a result; **edge**: learning_rate" in line
    for words in ("*majority class*", "does not cover a search", "at most 60 runs", "keras 3"):
        assert words in " ".join(text.split())


SPREAD = {"mean": 0.8, "deviation": 0.01}
CURVE = [dict(epoch=k, step=k, **dict.fromkeys(("train", "test", "train_loss"), SPREAD)) for k in (1, 2)]
COUNTS = [0] * 30 + [5, 10, 5] + [0] * 87


@pytest.mark.parametrize("plot", configurations.PLOTS)
def test_every_figure_can_be_drawn(plot, tmp_path):
    from dp2_keras.experiments import plots

    seen = {"second_moments": [{"step": 1, "counts": COUNTS}]}
    shared = dict(curve=CURVE, probes=[seen], staleness=2.0)
    varied = [result(method="DP2RMSprop", varied={"delay": s}, **shared) for s in (5, 20)]
    across = (
        [] if plot == "staleness" else [result(**shared), result(method="RMSprop", epsilon="inf", **shared)]
    )
    failed = result(method="DPAdam", seeds=0, errors=["no"])
    plots.draw({**report_of(*varied, *across, failed)[0], "plot": plot}, str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_caption_says_what_was_not_tuned():
    from dp2_keras.experiments import plots

    tuned = result(search={"runs": 60, "failed": 0, "edges": []})
    summary = report_of(tuned, result(method="DP2NoiseFloorRecipe", search=None))[0]
    assert plots._caption({**summary, "search": 60}).endswith(", but DP2NoiseFloorRecipe as stated")
    assert plots._caption({**summary, "search": 0}).endswith("; stated hyper-parameters")
    assert "but" not in plots._caption({**report_of(tuned)[0], "search": 60})


def test_the_report_says_what_is_missing():
    missing = result(method="DPAdam", seeds=0, hyper=None, paper=None)
    failed = result(method="DPAdagrad", seeds=0, errors=["ValueError: no\nway"])
    text = rendered(missing, failed, result(method="RMSprop", epsilon="inf"))
    assert "no hyper-parameters: search" in text and "all failed" in text and "∞" in text
    assert "DPAdagrad failed: ValueError: no way" in text


def test_the_report_says_when_a_method_was_as_good_as_dp_sgd_in_the_end():
    def curve(*values):
        return [{"step": 10 * (k + 1), "test": {"mean": value}} for k, value in enumerate(values)]

    slow = result(steps=50, curve=curve(0.5, 0.6, 0.7, 0.75, 0.8), test={"mean": 0.8, "deviation": None})
    fast = result(method="DP2RMSprop", curve=curve(0.7, 0.85, 0.9, 0.9, 0.9))
    bad = result(method="DPAdam", curve=curve(0.7, 0.7, 0.7, 0.7, 0.7))
    text = rendered(slow, fast, bad)
    assert "reached after 20, 2.5x" in text and "never as good as DP-SGD's end" in text


# The whole of it.


def command(out, *options):
    return cli.main(["reproduce", "--quick", "--jobs", "1", "--out", str(out), *options])


def test_a_quick_table_and_figure_end_to_end(tmp_path, capsys):
    options = (
        "--table main --figure curves --seeds 2 --epochs 1 --methods DPSGD --search 2 --refine 3".split()
    )
    assert command(tmp_path, *options) == 0
    captured = capsys.readouterr()
    assert "| DPSGD | 1 | " in captured.out and f"Report: {tmp_path}" in captured.out
    assert "[########################] 2/2 runs\n" in captured.err  # And then 3 around the better one.
    text = (tmp_path / "report.md").read_text()
    assert text.count("| DPSGD | 1 | ") == 2 and "![Learning curves](curves.png)" in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "main.json").read_text())
    (result,) = found["settings"][0]["results"]
    assert result["seeds"] == 2 and result["search"]["runs"] == 5 and found["versions"]["dp2_keras"]
    assert f"{result['epsilon']:.4f} | {result['train']['mean']:.3f} ± " in text
    lines = (tmp_path / "main.csv").read_text().splitlines()
    assert lines[0].startswith("key,task,method,seed") and len(lines) == 1 + 2
    # The winner is best on train; the figure shares the table's runs; a second call runs nothing.
    rows = (tmp_path / "runs.jsonl").read_text()
    searched = [row for row in map(json.loads, rows.splitlines()) if row["seed"] == search.SEED]
    assert result["hyper"] == max(searched, key=lambda row: row["curve"][-1]["train"])["hyper"]
    assert rows.count("\n") == 5 + 2 and command(tmp_path, *options) == 0
    assert (tmp_path / "runs.jsonl").read_text() == rows and "runs" not in capsys.readouterr().err


def test_a_search_by_halving_runs_the_best_to_the_end(tmp_path):
    options = "--table main --seeds 1 --epochs 4 --methods DPSGD --search 5 --halving --refine 1".split()
    assert command(tmp_path, *options) == 0
    rows = list(map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines()))
    searched = [row for row in rows if row["seed"] == search.SEED]
    assert [row["epochs"] for row in searched] == [1, 1, 1, 1, 1, 2, 2, 4, 4]
    best = sorted(searched[:5], key=lambda row: -row["curve"][-1]["train"])[:2]
    assert [row["hyper"] for row in searched[5:7]] in (
        [a["hyper"] for a in best],
        [a["hyper"] for a in best[::-1]],
    )
    (result,) = json.loads((tmp_path / "main.json").read_text())["settings"][0]["results"]
    assert result["search"]["runs"] == 6 and result["search"]["dropped"] == 4
    assert "| 6, 4 not to the end" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("name, value, none", [("refine", 3, 0), ("halving", True, False)])
def test_what_is_part_of_a_search_is_refused_without_one(tmp_path, name, value, none):
    with pytest.raises(
        ValueError, match=f"`{name}` must be {none} without a `search`. Received: {name}={value}"
    ):
        reproduce.Options(str(tmp_path), **{name: value})


def test_neighbours_differ_in_one_value_and_go_past_the_ends():
    grid = {"rate": [0.1, 0.3, 1], "delay": [1, 4], "power": [0.5, 1]}
    points = search.neighbours({"rate": 1, "delay": 1, "power": 1}, grid)
    assert [{name: p[name] for name in p if p[name] != 1} for p in points] == [
        {"delay": 4}, {"power": 0.5}, {"power": 2}, {"rate": 0.3}, {"rate": 3},
    ]  # fmt: skip


def test_a_failure_is_a_row_and_may_be_tried_again(tmp_path):
    bad = dataclasses.replace(RUN, hyper={"learning_rate": -1.0, "l2_norm_clip": 0.5})
    with Store(tmp_path / "rows.jsonl") as store:
        assert pool.execute([bad], store, jobs=1) == 1
        assert store.rows[bad.key]["status"] == "failed"
        assert "learning_rate" in store.rows[bad.key]["error"]
        assert pool.execute([bad], store, jobs=1) == 0
        assert pool.execute([bad], store, jobs=1, retry_failed=True) == 1


def test_workers_are_replaced_after_a_while(tmp_path, monkeypatch):
    waves = []

    def in_workers(runs, directory, jobs):
        waves.append((len(runs), jobs))
        yield from ((run, {"key": run.key, "status": "done"}) for run in runs)

    monkeypatch.setattr(pool, "_in_workers", in_workers)
    runs = [dataclasses.replace(RUN, seed=seed) for seed in range(100)]
    with Store(tmp_path / "rows.jsonl") as store:
        assert pool.execute([*runs, *runs], store, jobs=2) == 100
        assert pool.execute(runs, store, jobs=1) == 0
    with Store(tmp_path / "others.jsonl") as store:
        assert pool.execute(runs, store, jobs=1) == 100
    assert waves == [(80, 2), (20, 2), (40, 1), (40, 1), (20, 1)]


ORPHAN = """
import concurrent.futures, multiprocessing, os, time
from dp2_keras.experiments import pool

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, pool._begin, (1,)) as workers:
        print(workers.submit(os.getpid).result(), flush=True)
        workers.submit(time.sleep, 600).result()
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
    for _ in range(300):
        if not pathlib.Path(f"/proc/{worker}").exists():
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("A worker outlived its parent.")


def test_a_row_is_a_function_of_its_run(tmp_path):
    from dp2_keras.experiments import training

    first, again, other = [
        training.train(run) for run in (RUN, RUN, dataclasses.replace(RUN, seed=1, evaluations=1))
    ]
    assert without_times(first) == without_times(again)
    assert first["curve"] != other["curve"]
    assert first["steps"] == 10 and first["epsilon"] == pytest.approx(other["epsilon"])
    assert set(first["curve"][0]) == {"epoch", "step", "train", "test", "train_loss", "test_loss"}


def test_probes_find_what_they_say():
    from dp2_keras.experiments import training

    hyper = dict(learning_rate=1.0, l2_norm_clip=5.0, sgd_learning_rate=0.06, sgd_l2_norm_clip=0.5, delay=3)
    run = Run("synthetic", "DP2RMSprop", hyper, 0, 2, 200, 1.0, 2, ("second_moments", "staleness"))
    row = training.train(run)
    assert row["status"] == "done", row
    histograms, refreshes = row["probes_found"]["second_moments"], row["probes_found"]["staleness"]
    assert [sum(histogram["counts"]) for histogram in histograms] == [1001, 1001]
    assert [refresh["step"] for refresh in refreshes] == [3, 9, 15]
    assert all(refresh["mean"] > 0 and min(refresh["gradients"]) > 0 for refresh in refreshes)
    ratio = max(max(refresh["gradients"]) / refresh["mean"] for refresh in refreshes)
    assert summary.staleness([refreshes]) == pytest.approx(ratio) and summary.staleness([None]) is None


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_comes_to_the_same_results(tmp_path):
    options = "--quick --table main --seeds 3 --epochs 1 --methods DPSGD --jobs 2".split()
    line = [sys.executable, "-m", "dp2_keras.experiments", *options, "--out"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*line, str(whole)], check=True, timeout=300)
    process = subprocess.Popen([*line, str(killed)], start_new_session=True)
    rows = killed / "runs.jsonl"
    deadline = time.time() + 200
    while not (rows.exists() and rows.read_text()) and time.time() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = rows.read_text()
    assert 1 <= before.count("\n") <= 3
    subprocess.run([*line, str(killed)], check=True, timeout=300)
    assert rows.read_text().startswith(before)

    def results(directory):
        lines = (directory / "runs.jsonl").read_text().splitlines()
        return {row["key"]: without_times(row) for row in map(json.loads, lines)}

    assert results(killed) == results(whole) and len(results(whole)) == 3


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    for options, words in [
        ("", "Nothing to do"),
        ("--table main --search -1", "--search must be an integer of at least 0. Received: search=-1"),
        ("--table main --jobs 0", "--jobs must be a positive integer. Received: jobs=0"),
        ("--figure main", "invalid choice"),
    ]:
        with pytest.raises(SystemExit):
            cli.main(["reproduce", "--out", str(tmp_path), *options.split()])
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_the_list_names_everything(capsys):
    assert cli.main(["reproduce", "--list"]) == 0
    output = capsys.readouterr().out
    assert "--table main" in output and "--figure staleness" in output and "DP2RMSprop" in output


def test_the_other_commands_do_not_load_the_experiments():
    program = (
        "import sys; from dp2_keras import cli; "
        "cli.main('epsilon --dataset-size 1000 --batch-size 10 --epochs 1 --noise-multiplier 1'.split()); "
        "assert not [name for name in sys.modules if 'experiments' in name or name == 'tensorflow']"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
