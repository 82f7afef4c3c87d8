"""Record and replay: one step on neighbouring data, from one state and with one randomness.

With an example or without it (its weight is 1 or 0), a step must run the same operations on tensors of the
same shapes, call its mechanisms equally often, with equal noise, and move what goes into each of them by at
most the sensitivity that its noise is made for.
"""

import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

import dp2_keras as dp2
from dp2_keras.optimizers import base

rng = np.random.default_rng(0)
X = rng.normal(size=(8, 3)).astype(np.float32) * 10
Y = rng.normal(size=(8, 1)).astype(np.float32)
PUBLIC = (X[:4], Y[:4])


def piloted(optimizer):
    optimizer.settle_rate(480)
    optimizer.start_rate(0)  # The first 12 are the pilot's.
    return optimizer


TERMS = dict(noise_multiplier=1.0, noise_seed=0, expected_batch_size=8)
OPTIMIZERS = {
    "DPSGD": lambda: dp2.DPSGD(0.1, 0.7, **TERMS),
    "DPSGD, secure noise": lambda: dp2.DPSGD(0.1, 0.7, noise="secure", **TERMS),
    "DPRMSprop": lambda: dp2.DPRMSprop(0.1, 0.7, **TERMS),
    "DPAdagrad": lambda: dp2.DPAdagrad(0.1, 0.7, **TERMS),
    "DPYogi": lambda: dp2.DPYogi(0.1, 0.7, **TERMS),
    "DPAdam": lambda: dp2.DPAdam(0.1, 0.7, **TERMS),
    "DP2RMSprop": lambda: dp2.DP2RMSprop(0.1, 3.0, delay=2, sgd_l2_norm_clip=0.5, **TERMS),
    "DP2Adagrad": lambda: dp2.DP2Adagrad(0.1, 3.0, delay=1, **TERMS),
    "DP2Yogi": lambda: dp2.DP2Yogi(0.1, 3.0, delay=2, **TERMS),
    "DP2NoiseFloor": lambda: dp2.DP2NoiseFloor(0.1, 0.7, delay=2, **TERMS),
    "DP2NoiseFloor, pilot": lambda: piloted(dp2.DP2NoiseFloor(0.1, 0.7, delay=2, **TERMS)),
    "DP2RMSpropNoiseFirst": lambda: dp2.DP2RMSpropNoiseFirst(0.1, 0.7, delay=2, **TERMS),
    "DP2RMSpropExtraQuery": lambda: dp2.DP2RMSpropExtraQuery(0.1, 3.0, delay=2, **TERMS),
    "AdaDPSRMSprop": lambda: dp2.AdaDPSRMSprop(0.1, 3.0, **TERMS),
    "PDADPMD": lambda: dp2.PDADPMD(0.1, 0.7, alpha=0.5, **TERMS),
    "DPAdagradPublicSubspace": lambda: dp2.DPAdagradPublicSubspace(0.1, 0.7, subspace_size=2, **TERMS),
}
METHODS = [
    {"method": "ghost"},
    {"method": "vectorized"},
    {"method": "loop"},
    {"method": "vectorized", "physical_batch_size": 3},
]


def model_of(optimizer, **how):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    public = dict(public_data=PUBLIC) if optimizer.public_gradients else {}
    model = dp2.DP2Sequential(layers)
    model.compile(optimizer, loss="mse", run_eagerly=True, **how, **public)
    return model


@contextlib.contextmanager
def recorded():
    """Lists that fill with the operations of a step, and with what goes into its mechanisms."""
    operations, inputs = [], []
    real = base.add_noise

    def note(kind, inputs, attributes, outputs, op_name=None, graph=None):
        if graph is None:
            name = re.sub(r"_\d+$", "", str(kind))  # Functions are numbered.
            operations.append((name, tuple(tuple(t.shape) for t in outputs)))

    def heard(clipped, noise_multiplier, *rest):
        stddev = float(noise_multiplier * clipped.query.sensitivity)
        inputs.append((stddev, float(clipped.query.sensitivity), [v.numpy() for v in clipped.values]))
        return real(clipped, noise_multiplier, *rest)

    base.add_noise = heard
    op_callbacks.add_op_callback(note)
    try:
        yield operations, inputs
    finally:
        op_callbacks.remove_op_callback(note)
        base.add_noise = real


def replayed(make, how, steps, is_in):
    """The record of the step after some steps, with the last example or without it."""
    model = model_of(make(), **how)
    weights = np.ones(8, np.float32)
    for _ in range(steps):
        model.train_on_batch(X, Y, sample_weight=weights, sampling="poisson", dataset_size=100)
    weights[-1] = is_in
    with recorded() as record:
        model.train_on_batch(X, Y, sample_weight=weights, sampling="poisson", dataset_size=100)
    return record


def cases():
    """All optimizers, methods and phases; the quick ones are adaptive steps where there are any."""
    for name in OPTIMIZERS:
        for how in METHODS:
            for steps in (0, 2, 3):
                is_quick = steps == 3 and (how == METHODS[0] or "Subspace" in name or name == "DP2RMSprop")
                marks = () if is_quick else pytest.mark.slow
                identity = f"{name}-{'-'.join(map(str, how.values()))}-{steps}"
                yield pytest.param(name, how, steps, marks=marks, id=identity)


@pytest.mark.parametrize("name, how, steps", cases())
def test_a_neighbour_changes_nothing_but_the_sum_and_that_by_its_sensitivity(name, how, steps):
    make = OPTIMIZERS[name]
    (operations, inputs), (again, others) = (replayed(make, how, steps, is_in) for is_in in (1.0, 0.0))
    assert operations == again
    assert len(inputs) == len(others) == len(make().noise_multipliers(1.0))
    for (stddev, sensitivity, sums), (same, _, without) in zip(inputs, others):
        assert stddev == same
        moved = np.sqrt(sum(np.sum((a.astype(np.float64) - b) ** 2) for a, b in zip(sums, without)))
        assert 0.0 < moved <= sensitivity * (1 + 1e-5)


def test_the_record_tells_a_step_that_looks_at_the_data(monkeypatch):
    """A branch on whether the sum is large: it would make the records differ."""
    real = base.PrivateOptimizer._private_mean

    def peeking(self, clipped, stream, draw):
        size = float(tf.reduce_max(tf.abs(clipped.values[-1])))
        sizes.append(size)
        if size > limit:
            tf.identity(clipped.values[-1])
        return real(self, clipped, stream, draw)

    monkeypatch.setattr(base.PrivateOptimizer, "_private_mean", peeking)
    sizes, limit = [], np.inf
    for is_in in (1.0, 0.0):
        replayed(OPTIMIZERS["DPSGD"], METHODS[0], 0, is_in)
    limit = np.mean(sizes)
    with_it, without = (replayed(OPTIMIZERS["DPSGD"], METHODS[0], 0, is_in)[0] for is_in in (1.0, 0.0))
    assert with_it != without
