"""Runs and their store: keys that last, and rows that survive a kill."""

import dataclasses
import json
import math

import pytest
from experiment_cases import RUN, SGD

from dp2_keras.experiments.runs import Run
from dp2_keras.experiments.store import Store

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
