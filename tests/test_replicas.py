"""A step on several devices is the step on one: same weights, noise once, counted once."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import replica_runs
import tensorflow as tf

from dp2_keras import _keras, replicas
from dp2_keras.rows import Rows
from dp2_keras.sampling import PoissonSampler, dataset_of

SCRIPT = pathlib.Path(replica_runs.__file__)
needs_workers = pytest.mark.skipif(
    not _keras.FITS_ON_WORKERS, reason="Keras 3's own `fit` fails under a MultiWorkerMirroredStrategy."
)


def started(case, **environment):
    return subprocess.Popen(
        [sys.executable, SCRIPT, case],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    )


def answer(process, timeout=400):
    out, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


def start_workers(count, case="worker"):
    """Processes on loopback, each of which knows the addresses of all."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    cluster = {"worker": addresses}
    configurations = [{"cluster": cluster, "task": {"type": "worker", "index": k}} for k in range(count)]
    return [started(case, TF_CONFIG=json.dumps(c)) for c in configurations]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def mirrored():
    return answer(started("mirrored"))


@pytest.fixture(scope="module")
def workers():
    return [answer(process) for process in start_workers(2)]


def assert_same(found, expected):
    for name in ("weights", "second_moments"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=1e-6)
    assert [found[name] for name in ("steps", "iterations")] == [
        expected[name] for name in ("steps", "iterations")
    ]
    assert found["epsilon"] == expected["epsilon"]


@pytest.mark.slow
@pytest.mark.parametrize("case", replica_runs.CASES)
def test_two_replicas_train_the_weights_of_one(mirrored, case):
    found, expected = mirrored["two"][case], mirrored["one"][case]
    assert mirrored["replicas"] == [1, 2]
    assert_same(found, expected)
    assert found["logs"].keys() == expected["logs"].keys()
    for name, values in expected["logs"].items():
        np.testing.assert_allclose(found["logs"][name], values, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_the_noise_of_two_replicas_is_that_of_one(mirrored):
    for found in mirrored["noise"].values():  # 40,000 normals: a deviation of 1.5 is known to 0.35 %.
        assert found["deviation"] == pytest.approx(3.0 * 0.5, rel=0.02)
        assert found["copies_differ"] == 0


@pytest.mark.slow
def test_what_has_no_rule_to_be_shared_out_is_refused(mirrored):
    refusals = mirrored["refusals"]
    assert "must be used with one replica" in refusals["train_on_batch"]
    assert "must be used with one replica" in refusals["poisson_batches"]
    assert refusals["steps"] == 0


@pytest.mark.slow
@needs_workers
def test_two_workers_train_the_weights_of_one(workers, mirrored):
    for found in workers:
        assert found["replicas"] == 2
        for case in ("ghost", "budget"):
            assert_same(found[case], mirrored["one"][case])


@pytest.mark.slow
@needs_workers
def test_the_noise_of_two_workers_is_the_chiefs(workers):
    assert [found["wrote_a_ledger"] for found in workers] == [True, False]
    for found in workers:
        assert found["noise"]["deviation"] == pytest.approx(3.0 * 0.5, rel=0.02)
    assert workers[0]["noise"] == workers[1]["noise"]


@pytest.mark.slow
@needs_workers
def test_a_lost_worker_ends_in_an_error_and_no_further_step():
    left, lost = start_workers(2, "endless")
    try:
        assert all(process.stdout.readline() == "a step\n" for process in (left, lost))
        lost.send_signal(signal.SIGKILL)
        _, errors = left.communicate(timeout=300)
    finally:
        left.kill()
        lost.kill()
    assert left.returncode != 0
    assert "Error" in errors


@pytest.mark.skipif(_keras.FITS_ON_WORKERS, reason="Keras 2 can.")
def test_workers_are_refused_where_keras_cannot_train_them(monkeypatch):
    monkeypatch.setattr(replicas, "worker_count", lambda strategy: 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(ValueError, match="Keras 3 cannot `fit` under a MultiWorkerMirroredStrategy"):
        replicas.check_strategy(strategy, replica_runs.rmsprop())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_replicas_share_out_the_rows_that_one_would_have(count):
    rows = Rows.of((np.arange(100),))
    sampler = PoissonSampler(100, 20, seed=3)
    batches = dataset_of(rows, sampler, lambda: 5, replicas=range(count), of=count)
    found = [batch.numpy() for (batch,) in batches.take(20 * count)]
    for step in range(20):
        shares = found[step * count : (step + 1) * count]
        assert all((share % count == k).all() for k, share in enumerate(shares))
        assert sorted(np.concatenate(shares)) == list(sampler.rows(5 + step))


def test_workers_that_draw_apart_take_each_row_as_often_as_one_would():
    """Of 4,000 draws of rate 1/5 each row is in 800, with deviation 25.3; its rows are independent."""
    samplers = [PoissonSampler(10, 2) for _ in range(2)]
    counts, together = np.zeros(10), 0
    for step in range(4000):
        kept = [[r for r in s.rows(step) if r % 2 == k] for k, s in enumerate(samplers)]
        counts[kept[0]] += 1
        counts[kept[1]] += 1
        together += 0 in kept[0] and 1 in kept[1]
    assert np.abs(counts - 800).max() < 6 * 25.3
    assert abs(together - 160) < 6 * 12.4
