"""The demo runs end to end, on data small enough for a test."""

import pathlib
import runpy

import pytest

DEMO = pathlib.Path(__file__).parents[1] / "examples" / "demo.py"
SMALL = "--train-size 200 --test-size 50 --vocabulary-size 150 --batch-size 20 --epochs 2".split()


@pytest.fixture(scope="module")
def demo():
    return runpy.run_path(str(DEMO))


def table(output):
    """The rows of the printed table, by method."""
    lines = output.split("test accuracy\n")[1].split("\n\n")[0].splitlines()
    return {line[:16].strip(): line[16:].split() for line in lines}


def test_demo_prints_a_table_and_writes_a_plot(demo, tmp_path, capsys):
    path = tmp_path / "curves.png"
    demo["main"]([*SMALL, "--out", str(path)])
    output = capsys.readouterr().out
    rows = table(output)
    assert list(rows) == ["DPSGD", "DPRMSprop", "DP2RMSprop", "majority class"]
    assert len({rows[name][0] for name in ("DPSGD", "DPRMSprop", "DP2RMSprop")}) == 1
    assert rows["majority class"] == ["-", "0.500", "0.500"]
    assert "no guarantee" in output and str(path) in output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_seed_repeats_a_run_and_secret_means_none(demo):
    assert demo["parse"]([]).seed == 0 and demo["parse"](["--secret"]).seed is None
    train_set, test_set = demo["data"].synthetic_reviews(200, 50, 150)
    rows = []
    for _ in range(2):
        optimizer = demo["dp2"].DPSGD(1.0, 1.0, 1.0, noise_seed=5)
        rows.append(demo["train"](optimizer, train_set, test_set, batch_size=20, epochs=1))
    assert rows[0] == rows[1]
