"""The pilot: squares are clipped and noised like gradients, the weights stay, rates are for the rest."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from ghosts import (
    MODES,
    PHASES,
    answer_function,
    assert_close,
    clip_between,
    example_gradients,
    expected,
    private,
    scale,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import ALL, LABELS
from scipy import stats
from test_ghost import REPRESENTATIVE, VECTORIZABLE, in_blocks_of_one, unless_slow
from zoo import ROWS

import dp2_keras as dp2
from dp2_keras import pilot
from dp2_keras.optimizers.auto_rate import first_rate
from dp2_keras.per_example import contributions
from dp2_keras.per_example.sparse import SparseOuter
from dp2_keras.privatizer import ClippingQuery

ROUNDING = 1 + 1e-5

# Sums of squares.


@pytest.mark.parametrize(
    "case, mode, method",
    [
        *(unless_slow(case, "graph", "ghost") for case in ALL),
        *(unless_slow(case, "graph", "vectorized") for case in VECTORIZABLE),
        *(pytest.param(case, "xla", "ghost", marks=pytest.mark.slow) for case in REPRESENTATIVE),
        *((case, mode, method) for case in ("dense", "embedding") for mode, method in (
            ("eager", "ghost"), ("xla", "ghost"), ("xla", "vectorized"), ("graph", "loop"))),
    ],
)  # fmt: skip
def test_the_sum_of_squares_is_that_of_the_loop(case, mode, method):
    build, x = ALL[case]
    gradients = example_gradients(case)
    clip = clip_between((scale(private(build, x), "adaptive") * gradients) ** 2)
    model = private(build, x, method, clips=(clip, clip))
    answer = answer_function(model, mode, squared=True)
    for phase in PHASES:
        values, norms = answer(phase, x, LABELS)
        squares = (scale(model, phase) * gradients) ** 2
        np.testing.assert_allclose(norms, np.linalg.norm(squares, axis=1), rtol=2e-5)
        assert_close(values, expected(squares, 1.0, clip), tolerance=2e-5)


@pytest.mark.parametrize("case", ["dense_over_time", "conv1d", "used_twice"])
def test_squares_of_gradients_that_do_not_fit_in_memory_are_made_in_blocks(case, monkeypatch):
    build, x = ALL[case]
    sums = lambda: answer_function(private(build, x, "ghost"), squared=True)("adaptive", x, LABELS)[0]  # noqa: E731
    whole = sums()
    in_blocks_of_one(monkeypatch)
    assert_close(sums(), whole, tolerance=2e-5)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("method", ["ghost", "vectorized"])
@pytest.mark.parametrize("case", ["dense", "dense_over_time", "conv1d", "layer_norm", "prelu"])
def test_neighbours_differ_by_at_most_the_clip_norm(case, method, phase):
    build, x = ALL[case]
    clip = 0.3 * clip_between(example_gradients(case) ** 2)
    answer = answer_function(private(build, x, method, clips=(clip, clip)), squared=True)
    for index in (0, 4):
        others = np.arange(ROWS) != index
        without = answer(phase, x[others], LABELS[others])[0]
        for value in (None, 1e12, 1e5, 1e-12, np.nan, np.inf):
            changed = x.copy()
            changed[index] = x[index] if value is None else value
            difference = answer(phase, changed, LABELS)[0] - without
            assert np.linalg.norm(difference) <= clip * ROUNDING + 1e-6 * clip
            if value is None:
                assert np.linalg.norm(difference) > 0


def test_squares_of_sparse_rows_are_those_of_the_dense():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(6, 9)).astype(np.float32) * (rng.random((6, 9)) < 0.4)
    d, squared_scale = (rng.normal(size=shape).astype(np.float32) ** 2 for shape in ((6, 3), (9, 3)))
    factors, kept = tf.constant(rng.random(6), tf.float32), tf.constant([True] * 5 + [False])
    found = []
    for rows, kind in ((tf.constant(a), contributions.Outer), (tf.sparse.from_dense(a), SparseOuter)):
        squared = kind(rows, tf.constant(d), [9, 3]).squared()
        found.append((squared.squared_norms(tf.constant(squared_scale)), squared.weighted_sum(factors, kept)))
    for dense, sparse in zip(*found):
        np.testing.assert_allclose(dense, sparse, rtol=1e-5, atol=1e-7)
    products = (a[:, :, None] * d[:, None]) ** 2
    np.testing.assert_allclose(found[0][1], np.tensordot(factors[:5], products[:5], 1), rtol=1e-4, atol=1e-6)


def powers(shape, least, most):
    """Numbers of any size between powers of ten."""
    exponents = st.lists(st.integers(least, most), min_size=math.prod(shape), max_size=math.prod(shape))
    return exponents.map(lambda p: np.reshape(10.0 ** np.array(p), shape).astype(np.float32))


@pytest.mark.parametrize("kind", [contributions.Outer, SparseOuter])
@settings(max_examples=40, deadline=None)
@given(a=powers((2, 3), -30, 12), d=powers((2, 2), -30, 12), scales=powers((3, 2), -15, 8))
def test_squares_of_any_size_are_clipped(kind, a, d, scales):
    """Squares of float32 vanish below 1e-38 and are infinite above 1e38, and so do squares of squares."""
    rows = tf.sparse.from_dense(a) if kind is SparseOuter else tf.constant(a)
    squared = kind(rows, tf.constant(d), [3, 2]).squared()
    query = ClippingQuery([], None, l2_norm_clip=1e-3)
    factors, kept, _ = query.factors(squared.squared_norms(tf.constant(scales)), tf.constant([True, True]))
    for example in range(2):
        alone = kept & tf.constant(np.arange(2) == example)
        added = squared.weighted_sum(factors, alone).numpy().astype(np.float64) * scales
        assert np.linalg.norm(added) <= 1e-3 * ROUNDING


# What a round makes of them.


@given(st.lists(st.floats(-1e3, 1e4, width=32), min_size=1, max_size=6), st.floats(2**-10, 8, width=32))
def test_a_round_changes_the_scale_as_the_equations_say(energies, noise):
    half = len(energies) // 2
    parts = [tf.constant(part, tf.float32) for part in (energies[:half], energies[half:])]
    changes = np.exp(np.concatenate([c.numpy() for c in pilot.log_changes(parts, noise)]))
    above = np.maximum(np.array(energies) - 2 * noise, 0)
    factor = (1 + above / noise) ** -0.25
    k = np.sqrt(np.sum(above) / np.sum(above * factor**2)) if above.any() else 1.0
    np.testing.assert_allclose(changes, factor * np.sqrt(k), rtol=1e-4)


def test_noise_alone_changes_little():
    energies = tf.constant(np.random.default_rng(0).normal(size=10_000), tf.float32)
    changes = np.exp(pilot.log_changes([energies], 1.0)[0])
    assert np.mean(np.abs(changes - np.median(changes)) < 1e-6) > 0.97


@pytest.mark.parametrize(
    "steps, expected", [(None, 0), (0, 0), (479, 0), (480, 12), (720, 18), (10_000, 249)]
)
def test_a_pilot_has_rounds_of_at_least_four_steps(steps, expected):
    assert pilot.pilot_steps(steps, 0.025) == expected


# The steps of an optimizer.

N, BATCH, STEPS = 200, 20, 480
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32) * [10.0, 1.0, 1.0]
Y = (X[:, 1:2] > 0).astype(np.float32)


def logistic(optimizer):
    dense = keras.layers.Dense(1, activation="sigmoid", kernel_initializer="ones")
    model = dp2.DP2Sequential([keras.Input((3,)), dense])
    model.compile(optimizer, loss="binary_crossentropy")
    return model


def fit(model, epochs=STEPS * BATCH // N, **kwargs):
    return model.fit(X, Y, batch_size=BATCH, epochs=epochs, verbose=0, **kwargs)


def begin(optimizer):
    """What `fit` says to the optimizer."""
    optimizer.settle_rate(STEPS)
    optimizer.start_rate(0)
    assert optimizer.pilot_steps == 12


class Path(keras.callbacks.Callback):
    """The rate and the weights of each step."""

    def on_train_begin(self, logs=None):
        self.rates, self.weights = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(np.asarray(self.model.optimizer._rate(None))))
        self.weights.append(self.model.get_weights()[0])


class StopAt(keras.callbacks.Callback):
    """A fit that is interrupted after some steps."""

    def __init__(self, step):
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == self._step:
            raise KeyboardInterrupt


def rates_of_all(sigma=1.0, clip=0.3):
    of_rest = STEPS - 12
    first = first_rate(0.5, sigma * clip / BATCH, of_rest)
    return np.concatenate([np.zeros(12), first * np.arange(of_rest, 0, -1) / of_rest])


def test_the_weights_stay_and_then_have_the_rates_of_the_rest():
    model, path = logistic(dp2.DP2NoiseFloor(noise_multiplier=1.0, weight_decay=0.1)), Path()
    fit(model, callbacks=[path])
    np.testing.assert_allclose(path.rates, rates_of_all(), rtol=1e-5)
    np.testing.assert_array_equal(path.weights[12], path.weights[0])
    assert not np.array_equal(path.weights[13], path.weights[12])
    assert model.optimizer.path_variance == pytest.approx(0.25, rel=1e-5)


def test_what_is_long_in_every_example_is_scaled_down():
    model = logistic(dp2.DP2NoiseFloor(noise_multiplier=0.1, power=0.0, noise_seed=1))
    fit(model)
    found = model.optimizer._scale(model.trainable_variables[0]).numpy()[:, 0]
    assert found[0] < 0.6 * found[1] and found[1] == pytest.approx(found[2], rel=0.3)


def test_a_stretch_is_at_most_1_and_a_layer_that_was_frozen_has_none():
    frozen = keras.layers.Dense(3, trainable=False)
    model = dp2.DP2Sequential([keras.Input((3,)), frozen, keras.layers.Dense(2), keras.layers.Dense(1)])
    optimizer = dp2.DP2NoiseFloor(noise_multiplier=0.1, noise_seed=1)
    optimizer.build(model.variables)
    model.compile(optimizer, loss="mse")
    fit(model)
    stretches = [optimizer._pilot_stretch(v).numpy() for v in model.trainable_variables]
    assert [np.max(stretch) for stretch in stretches] == [1.0] * 4
    assert np.min(stretches[0]) < 0.9  # The first of the inputs is ten times as long.
    for variable in frozen.variables:
        assert np.all(optimizer._pilot_stretch(variable) == 1.0)


def test_every_step_of_it_is_paid():
    model, other = logistic(dp2.DP2NoiseFloor(noise_multiplier=1.0)), logistic(dp2.DPSGD(0.1, 0.3, 1.0))
    fit(model), fit(other)
    assert model.ledger.steps == other.ledger.steps == STEPS
    assert model.privacy_spent(1e-3) == other.privacy_spent(1e-3)
    assert model.optimizer.mechanism().l2_norm_clips == (0.3, pilot.squares_clip(0.3))


@pytest.mark.parametrize("jit", [False, True])
def test_noise_of_its_steps_has_exactly_the_stated_deviation(jit):
    class Wide(keras.layers.Layer):
        """Weights that no example has a gradient for."""

        def build(self, input_shape):
            self.bias = self.add_weight(shape=(20_000,), initializer="zeros", name="bias")

        def call(self, inputs):
            return inputs[:, :1] + 0.0 * self.bias[0]

    model = dp2.DP2Sequential([keras.Input((1,)), Wide()])
    optimizer = dp2.DP2NoiseFloor(0.1, 2.0, 1.5, expected_batch_size=4, noise_seed=7)
    begin(optimizer)
    model.compile(optimizer, loss="mse", jit_compile=jit)
    model.train_on_batch(np.ones((3, 1)), np.ones((3, 1)))
    noise = 4 * optimizer._mean_squares[0].numpy()  # A round has 4 steps.
    stated = 1.5 * (0.01 * 2.0**2) / 4
    assert stats.kstest(noise, "norm", args=(0, stated)).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(noise, "norm", args=(0, wrong * stated)).pvalue < 1e-9


@pytest.mark.parametrize("stop", [5, 12, 17])
def test_a_new_process_goes_on_where_it_was(tmp_path, stop):
    make = lambda: logistic(dp2.DP2NoiseFloor(noise_multiplier=1.0, noise_seed=3))  # noqa: E731
    backup = lambda: keras.callbacks.BackupAndRestore(str(tmp_path / "b"), save_freq=4)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        fit(make(), callbacks=[backup(), StopAt(stop)])
    model, path = make(), Path()
    fit(model, callbacks=[backup(), path])
    # Of the epoch that is gone on with, batches that were trained on are passed over, at an idle rate.
    np.testing.assert_allclose(path.rates[-460:], rates_of_all()[-460:], rtol=1e-5)
    assert model.optimizer.pilot_steps == 12
    assert model.optimizer.path_variance == pytest.approx(0.25, rel=1e-4)


def test_a_second_fit_keeps_the_scale_of_the_first():
    model, path = logistic(dp2.DP2NoiseFloor(noise_multiplier=1.0)), Path()
    fit(model)
    scales = [v.numpy() for v in model.optimizer._log_scales]
    fit(model, callbacks=[path])
    assert path.rates[0] == pytest.approx(first_rate(0.5, 0.3 / BATCH, STEPS), rel=1e-5)
    for before, after in zip(scales, model.optimizer._log_scales):
        np.testing.assert_array_equal(before, after.numpy())
        assert np.any(before != 0)


def test_a_rate_that_is_given_has_a_pilot_too():
    model, path = logistic(dp2.DP2NoiseFloor(0.25, noise_multiplier=1.0)), Path()
    fit(model, callbacks=[path])
    assert path.rates == [0.0] * 12 + [0.25] * (STEPS - 12)


@pytest.mark.parametrize("how, epochs", [({"pilot_share": 0.0}, 48), ({}, 47)])
def test_there_is_none_if_it_is_not_wanted_or_too_short(how, epochs):
    model, path = logistic(dp2.DP2NoiseFloor(noise_multiplier=1.0, **how)), Path()
    fit(model, epochs=epochs, callbacks=[path])
    assert model.optimizer.pilot_steps == 0 and min(path.rates) > 0


def test_a_fit_that_is_shorter_than_what_is_left_of_the_pilot_moves_nothing():
    model, path = logistic(dp2.DP2NoiseFloor(noise_multiplier=1.0, pilot_share=0.1)), Path()
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[StopAt(5)])
    assert model.optimizer.pilot_steps == 48
    fit(model, epochs=2, callbacks=[path])
    assert path.rates == [0.0] * 20 and model.optimizer.path_variance == 0.0


@pytest.mark.parametrize("first", [20, 47])
def test_epochs_that_an_earlier_fit_took_are_not_the_pilots(first):
    model, path = logistic(dp2.DP2NoiseFloor(noise_multiplier=1.0)), Path()
    fit(model, initial_epoch=first, callbacks=[path])
    assert model.optimizer.pilot_steps == 0
    whole = first_rate(0.5, 0.3 / BATCH, STEPS) * np.arange(STEPS, 0, -1) / STEPS
    np.testing.assert_allclose(path.rates, whole[10 * first :], rtol=1e-5)


def test_a_rate_that_a_callback_sets_to_0_stays():
    model, path = logistic(dp2.DP2NoiseFloor(noise_multiplier=1.0)), Path()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 * (epoch > 2))
    fit(model, callbacks=[schedule, path])
    assert set(path.rates[:12]) == {0.0} and set(path.rates[30:]) == {np.float32(0.01)}


@pytest.mark.parametrize("stop", [305, 475])
def test_a_fit_that_a_ledger_file_and_a_backup_resume_has_the_rates_of_the_whole(tmp_path, stop):
    def resumable(model, *more):
        budget = dp2.PrivacyBudget(epsilon, 1e-3)
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        return fit(model, callbacks=[budget, backup, *more], ledger_file=str(tmp_path / "ledger"))

    whole = logistic(dp2.DP2NoiseFloor(noise_multiplier=1.0))
    fit(whole)
    epsilon = 1.05 * whole.privacy_spent(1e-3)  # The steps of half an epoch are paid twice.
    model, path = logistic(dp2.DP2NoiseFloor(noise_multiplier=1.0)), Path()
    with pytest.raises(KeyboardInterrupt):
        resumable(model, StopAt(stop))
    model.release_ledger_file()
    model = logistic(dp2.DP2NoiseFloor(noise_multiplier=1.0))
    resumable(model, path)
    np.testing.assert_allclose(path.rates, rates_of_all()[-len(path.rates) :], rtol=1e-5)
    assert int(model.optimizer.iterations.numpy()) == STEPS


def test_the_memory_of_squares_is_that_of_their_gradients():
    """A layer that is used twice makes two gradients, and so do its squares."""
    window = tf.ones([2, 6, 3]), tf.ones([2, 6, 4])
    part = contributions.Total([contributions.Outer(*window, [3, 4]), contributions.Outer(*window, [3, 4])])
    assert part.squared().elements() == part.elements() == 24


def test_a_clip_whose_squares_would_vanish_is_refused():
    with pytest.raises(ValueError, match="`l2_norm_clip` must be at least 1e-5, or `pilot_share=0`"):
        dp2.DP2NoiseFloor(0.1, 1e-6, 1.0)
    dp2.DP2NoiseFloor(0.1, 1e-6, 1.0, pilot_share=0.0)


@pytest.mark.parametrize("share", [-0.1, 1.0, "a", None])
def test_a_share_is_a_part(share):
    with pytest.raises(ValueError, match="`pilot_share` must be at least 0 and below 1"):
        dp2.DP2NoiseFloor(noise_multiplier=1.0, pilot_share=share)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_has_a_sum_of_zero(mode):
    build, x = ALL["dense"]
    values, norms = answer_function(private(build, x), mode, squared=True)("adaptive", x[:0], LABELS[:0])
    assert not values.any() and norms.shape == (0,)


def test_the_guard_trips_for_an_answer_without_squares():
    """A step of the pilot takes the answer to its own query and no other."""
    model = logistic(dp2.DP2NoiseFloor(0.1, noise_multiplier=1.0, expected_batch_size=4))
    begin(model.optimizer)
    query = model.optimizer.begin_step(model.trainable_variables)
    other = dp2.DPSGD(0.1, 0.3, 1.0, expected_batch_size=4).begin_step(model.trainable_variables)
    answer, _ = model._answer(other, (tf.constant(X[:4]), tf.constant(Y[:4]), None))
    with pytest.raises(dp2.NonPrivateUpdateError):
        model.optimizer.finish_step(answer.clipped_sum)
    assert bool(query.is_squared)
    assert zoo.flat(model.trainable_variables).tolist() == [1.0, 1.0, 1.0, 0.0]
