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

import dp2_keras as dp2
from dp2_keras import _keras, replicas
from dp2_keras.privatizer import ClippedSum, ClippingQuery
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
def quick():
    return answer(started("quick"))


@pytest.fixture(scope="module")
def workers():
    return [answer(process) for process in start_workers(2)]


@pytest.fixture(scope="module")
def pairs():
    return [answer(process) for process in start_workers(2, "pair")]


def assert_same(found, expected):
    for name in ("weights", "second_moments"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=1e-6)
    assert [found[name] for name in ("steps", "iterations")] == [
        expected[name] for name in ("steps", "iterations")
    ]
    assert found["epsilon"] == expected["epsilon"]


def test_two_replicas_train_the_weights_of_one_with_the_noise_of_one(quick):
    assert_same(quick["two"], quick["one"])
    assert quick["noise"]["deviation"] == pytest.approx(3.0 * 0.5, rel=0.02)  # 40,000 normals.
    assert quick["noise"]["copies_differ"] == 0


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
def test_two_workers_of_two_replicas_train_the_weights_of_one_with_the_noise_of_one(pairs, mirrored):
    assert [found["wrote_a_ledger"] for found in pairs] == [True, False]
    assert pairs[0]["noise"] == pairs[1]["noise"]
    for found in pairs:
        assert found["replicas"] == 4
        assert found["noise"]["deviation"] == pytest.approx(3.0 * 0.5, rel=0.02)
        assert found["noise"]["copies_differ"] == 0
        for case in ("ghost", "budget"):
            assert_same(found[case], mirrored["one"][case])


@pytest.mark.slow
@needs_workers
def test_a_lost_worker_ends_in_an_error():
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


@pytest.mark.skipif(_keras.FITS_ON_WORKERS, reason="Keras 2 trains several workers")
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
    """Of 2,000 draws of rate 1/5 each row is in 400, with deviation 17.9; rows are independent."""
    rows, steps = Rows.of((np.arange(10),)), 2000
    counts, in_both = np.zeros(10), np.ones([2, steps], bool)
    for k in range(2):
        batches = dataset_of(rows, PoissonSampler(10, 2), lambda: 0, steps, replicas=range(k, k + 1), of=2)
        for step, (batch,) in enumerate(batches):
            counts[batch.numpy()] += 1
            in_both[k, step] = k in batch.numpy()
    assert np.abs(counts - 400).max() < 6 * 17.9
    assert abs(in_both.all(axis=0).sum() - 80) < 6 * 8.8  # Rows 0 and 1, of different workers.


def two_workers(monkeypatch):
    monkeypatch.setattr(replicas, "worker_count", lambda strategy: 2)
    monkeypatch.setattr(_keras, "FITS_ON_WORKERS", True)


@pytest.mark.parametrize(
    "optimizer",
    [dp2.DPSGD(0.1, 1.0, 1.0, noise="secure"), dp2.AdaDPSRMSprop(0.1, 1.0, 1.0)],
    ids=["secure noise", "public data"],
)
def test_what_each_worker_would_do_by_itself_is_refused(monkeypatch, optimizer):
    two_workers(monkeypatch)
    with pytest.raises(ValueError, match="must be used with one worker. Received: 2 workers"):
        replicas.check_strategy(tf.distribute.get_strategy(), optimizer)


@pytest.mark.parametrize("arguments", [{"sampling": "shuffle"}, {"max_batch_size": 30}], ids=str)
def test_batches_that_workers_would_draw_apart_are_refused(monkeypatch, arguments):
    """Each would shuffle for itself, and an example could be in a step twice."""
    model = replica_runs.model_of(replica_runs.rmsprop())
    monkeypatch.setattr(replicas, "check_strategy", lambda *_: None)
    two_workers(monkeypatch)
    if "max_batch_size" in arguments:
        monkeypatch.setattr(type(model), "distribute_strategy", _Two())
    with pytest.raises(ValueError, match="must be used with one worker"):
        model.fit(replica_runs.X, replica_runs.Y, batch_size=20, verbose=0, **arguments)
    assert model.ledger.steps == 0


class _Two:
    """As much of a strategy of two workers as is looked at before the first step."""

    num_replicas_in_sync = 2

    class extended:
        worker_devices = ("CPU:0",)
        _get_replica_id_in_sync_group = staticmethod(lambda k: k)


def test_a_step_by_hand_is_refused_on_several_replicas():
    """Each would be given the same examples, which then count as often as there are replicas."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    model = replica_runs.model_of(replica_runs.rmsprop(expected_batch_size=20))
    with pytest.raises(ValueError, match="A step outside of `fit` must be used with one replica"):
        with tf.distribute.ReplicaContext(strategy, 0):
            model._gated_step([])


def test_a_strategy_whose_replicas_go_their_own_ways_is_refused():
    class ParameterServerStrategyV2:
        num_replicas_in_sync = 1

    with pytest.raises(ValueError, match="must be a MirroredStrategy.*Received: ParameterServerStrategyV2"):
        replicas.check_strategy(ParameterServerStrategyV2(), replica_runs.rmsprop())


def test_sums_of_workers_have_no_bits_beyond_those_of_the_noise(monkeypatch):
    two_workers(monkeypatch)
    monkeypatch.setattr(replicas, "sum_over_workers", lambda tensors: [2 * t for t in tensors])
    (total,) = replicas.added_up([tf.constant(1 + 2.0**-40, tf.float64)])
    assert total.dtype == tf.float64 and float(total) == 2.0


def test_only_answers_to_one_query_are_added_up():
    queries = [ClippingQuery([tf.zeros([2])], None, 1.0) for _ in range(2)]
    one, other = (ClippedSum(query, [tf.ones([2])]) for query in queries)
    assert one.plus([one]).values[0].numpy().tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="one and the same query"):
        one.plus([other])
