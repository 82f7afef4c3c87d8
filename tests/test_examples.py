"""The example of each data set runs end to end, on files small enough for a test."""

import pathlib
import runpy

import numpy as np
import pytest

from dp2_keras.data import stackoverflow_cache

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SHORT = "--batch-size 20 --epochs 1".split()


def run(name, capsys, *options):
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]([*SHORT, *map(str, options)])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "optimizer, features",
    [("DP2NoiseFloor", "frequencies"), ("DP2RMSprop", "binary"), ("DPRMSprop", "tfidf"), ("DPSGD", "counts")],
)
def test_imdb(optimizer, features, tmp_path, capsys):
    rng = np.random.default_rng(0)
    part = dict(indptr=np.arange(0, 505, 5), indices=rng.integers(4, 500, 500), labels=np.arange(100) % 2)
    arrays = {f"{split}_{name}": values for split in ("train", "test") for name, values in part.items()}
    np.savez(tmp_path / "imdb.npz", **arrays)
    told = ("--optimizer", optimizer, "--features", features)
    output = run("imdb", capsys, "--data", tmp_path / "imdb.npz", *told)
    assert f"{optimizer}: test accuracy 0." in output and "epsilon = 3" in output.replace("2.99", "3")


@pytest.mark.parametrize("factors", [0, 2])
def test_movielens(factors, tmp_path, capsys):
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(1, 944)}\t{rng.integers(1, 1683)}\t{1 + k % 5}\t0\n" for k in range(200)]
    (tmp_path / "u.data").write_text("".join(lines))
    output = run("movielens", capsys, "--data", tmp_path, "--factors", factors)
    assert "test MSE " in output and "mean rating " in output


def test_stackoverflow(tmp_path, capsys):
    sentences = [({k % 7: 1, 7: 2}, [k % 3]) for k in range(100)]
    words, tags = [f"w{k}" for k in range(8)], ["c", "java", "sql"]
    path = tmp_path / "stackoverflow.npz"
    splits = {"train": sentences, "test": sentences}
    stackoverflow_cache.write(path, splits, words, tags, {"source": "a test"})
    output = run("stackoverflow", capsys, "--data", path)
    assert "100 sentences of a test" in output and "most frequent tag 0.340" in output
