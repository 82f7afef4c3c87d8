"""The experiments: quick reproductions on embedded data, that resume, and choose by training metrics."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from experiment_cases import RUN

from dp2_keras import cli
from dp2_keras.experiments import pool, reproduce, search, summary
from dp2_keras.experiments.runs import Run
from dp2_keras.experiments.store import Store

WHOLE = {"name": "main", "title": "Private methods at one budget", "source": "Table 2", "plot": None}


def without_times(row):
    return {name: value for name, value in row.items() if name != "seconds"}


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
    assert text.count("| DPSGD | 1 | ") == 2 and "![Learning curves, a quick look](curves-quick.png)" in text
    assert (tmp_path / "curves-quick.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "main-quick.json").read_text())
    (result,) = found["settings"][0]["results"]
    assert result["seeds"] == 2 and result["versions"][0]["dp2_keras"]
    assert f"{result['epsilon']:.4f} | {result['train']['mean']:.3f} ± " in text
    lines = (tmp_path / "main-quick.csv").read_text().splitlines()
    assert lines[0].startswith("key,task,method,seed") and len(lines) == 1 + 2
    # The winner is best on train; the figure shares the table's runs; a second call runs nothing.
    rows = (tmp_path / "runs.jsonl").read_text()
    searched = [row for row in map(json.loads, rows.splitlines()) if row["seed"] == search.SEED]
    assert result["hyper"] == max(searched, key=lambda row: row["curve"][-1]["train"])["hyper"]
    assert 2 + 3 <= len(searched) <= 2 + 3 + search.PAST_ENDS and result["search"]["runs"] == len(searched)
    assert rows.count("\n") == len(searched) + 2 and command(tmp_path, *options) == 0
    assert (tmp_path / "runs.jsonl").read_text() == rows and "runs" not in capsys.readouterr().err


def test_calls_for_one_method_each_make_one_table(tmp_path):
    for method in ("DPSGD", "DPRMSprop"):
        assert command(tmp_path, *f"--table main --seeds 1 --epochs 1 --methods {method}".split()) == 0
    found = json.loads((tmp_path / "main-quick.json").read_text())
    assert [result["method"] for result in found["settings"][0]["results"]] == ["DPSGD", "DPRMSprop"]
    assert len((tmp_path / "main-quick.csv").read_text().splitlines()) == 1 + 2
    assert "| DPSGD | " in (tmp_path / "report.md").read_text()


def test_a_quick_look_leaves_the_whole_table_alone(tmp_path):
    (tmp_path / "main.json").write_text(json.dumps(dict(WHOLE, settings=[])))
    assert command(tmp_path, *"--table main --seeds 1 --epochs 1 --methods DPSGD".split()) == 0
    assert json.loads((tmp_path / "main.json").read_text()) == dict(WHOLE, settings=[])
    headings = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("#")]
    assert headings[1:] == [
        "## Private methods at one budget",
        "## Private methods at one budget, a quick look",
        "### Synthetic reviews",
    ]


def test_a_search_by_halving_runs_the_best_to_the_end(tmp_path):
    options = "--table main --seeds 1 --epochs 4 --methods DPSGD --search 5 --halving --refine 1".split()
    assert command(tmp_path, *options) == 0
    rows = list(map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines()))
    searched = [row for row in rows if row["seed"] == search.SEED]
    around = len(searched) - 8  # One, and what is past an end that the best stands at.
    assert [row["epochs"] for row in searched] == [1, 1, 1, 1, 1, 2, 2, 4] + around * [4]
    best = sorted(searched[:5], key=lambda row: -row["curve"][-1]["train"])[:2]
    assert [row["hyper"] for row in searched[5:7]] in (
        [a["hyper"] for a in best],
        [a["hyper"] for a in best[::-1]],
    )
    (result,) = json.loads((tmp_path / "main-quick.json").read_text())["settings"][0]["results"]
    assert result["search"]["runs"] == 5 + around and result["search"]["dropped"] == 4
    assert 1 <= around <= 1 + search.PAST_ENDS
    assert f"| {5 + around}, 4 not to the end" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("name, value, none", [("refine", 3, 0), ("halving", True, False)])
def test_what_is_part_of_a_search_is_refused_without_one(tmp_path, name, value, none):
    with pytest.raises(
        ValueError, match=f"`{name}` must be {none} without a `search`. Received: {name}={value}"
    ):
        reproduce.Options(str(tmp_path), **{name: value})


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
