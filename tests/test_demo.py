"""The demo runs end to end, on data small enough for a test."""

import pathlib
import runpy

import numpy as np
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
        optimizer = demo["dp2"].DPSGD(1.0, 1.0, 1.0, expected_batch_size=20, noise_seed=5)
        rows.append(demo["train"](optimizer, train_set, test_set, epochs=1, seed=5))
    assert rows[0] == rows[1]


def test_batches_are_poisson_samples(demo):
    n, q = 200, 0.1
    x, y = np.arange(n, dtype=np.float32)[:, None], np.zeros(n, np.float32)
    batches = demo["poisson_batches"](x, y, batch_size=20, seed=0).take(400).as_numpy_iterator()
    rows = [x[:, 0].astype(int) for x, _ in batches]
    sizes, counts = np.array([len(r) for r in rows]), np.bincount(np.concatenate(rows), minlength=n)
    assert all(len(set(r)) == len(r) for r in rows)
    np.testing.assert_allclose(sizes.mean(), n * q, rtol=0.05)
    np.testing.assert_allclose(sizes.var(), n * q * (1 - q), rtol=0.3)
    assert abs(counts - 400 * q).max() < 5 * np.sqrt(400 * q)


def test_training_takes_the_stated_steps_and_new_batches_in_each_epoch(demo):
    seen = []

    class Recording:
        """An array that notes which rows are asked for."""

        shape = (40, 3)

        def __len__(self):
            return 40

        def __getitem__(self, rows):
            seen.append(tuple(rows))
            return np.zeros((len(rows), 3), np.float32)

    batches = demo["poisson_batches"](Recording(), np.zeros(40, np.float32), batch_size=4, seed=0)
    optimizer = demo["dp2"].DPSGD(0.1, 1.0, 1.0, expected_batch_size=4, noise_seed=0)
    model = demo["logistic_regression"](3, optimizer)
    model.fit(batches, steps_per_epoch=10, epochs=3, shuffle=False, verbose=0)
    assert int(optimizer.iterations) == 30
    assert len(set(seen)) >= 28  # A sampler that starts anew in each epoch would give 10.
