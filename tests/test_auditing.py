"""Audits: bounds that hold, an attack that is nearly tight, and broken builds that are found out."""

import functools
import math

import keras
import numpy as np
import pytest
from scipy import stats

import dp2_keras as dp2
from dp2_keras import cli
from dp2_keras.auditing import bounds, canaries
from dp2_keras.auditing.bounds import Rates

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(20, 3)).astype(np.float32), rng.normal(size=20).astype(np.float32)

OPTIMIZERS = {
    "DPSGD": lambda **noise: dp2.DPSGD(0.1, 1.0, **noise),
    "DPRMSprop": lambda **noise: dp2.DPRMSprop(0.1, 1.0, **noise),
    "DPAdagrad": lambda **noise: dp2.DPAdagrad(0.1, 1.0, **noise),
    "DPYogi": lambda **noise: dp2.DPYogi(0.1, 1.0, **noise),
    "DPAdam": lambda **noise: dp2.DPAdam(0.1, 1.0, **noise),
    "DP2RMSprop": lambda **noise: dp2.DP2RMSprop(0.1, 5.0, delay=3, sgd_l2_norm_clip=0.5, **noise),
    "DP2Adagrad": lambda **noise: dp2.DP2Adagrad(0.1, 5.0, delay=3, **noise),
    "DP2Yogi": lambda **noise: dp2.DP2Yogi(0.1, 5.0, sgd_steps=2, adaptive_steps=4, **noise),
    "DP2NoiseFloor": lambda **noise: dp2.DP2NoiseFloor(0.1, 1.0, delay=2, **noise),
    "DP2RMSpropNoiseFirst": lambda **noise: dp2.DP2RMSpropNoiseFirst(0.1, 1.0, delay=3, **noise),
    "AdaDPSRMSprop": lambda **noise: dp2.AdaDPSRMSprop(0.1, 1.0, **noise),
    "PDADPMD": lambda **noise: dp2.PDADPMD(0.1, 1.0, alpha=0.5, **noise),
    "PublicSubspace": lambda **noise: dp2.DPAdagradPublicSubspace(0.1, 1.0, subspace_size=2, **noise),
}
PILOTED = functools.partial(dp2.DP2NoiseFloor, 0.1, l2_norm_clip=1.0, delay=2, pilot_share=0.9)
PUBLIC = dict(public_data=(X[:5] + 1, Y[:5]), public_batch_size=3)


def model_of(optimizer, **arguments):
    model = dp2.DP2Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    public = PUBLIC if optimizer.public_gradients else {}
    model.compile(optimizer, loss="mse", **public, **arguments)
    return model


def audited(optimizer, *, batch_size=102, epochs=1, num_canaries=1000, **arguments):
    model = model_of(optimizer, **arguments.pop("how", {}))
    sizes = dict(batch_size=batch_size, epochs=epochs, num_canaries=num_canaries)
    return dp2.audit(model, X, Y, **sizes, seed=0, **arguments)


# Bounds.


def test_rates_are_bounded_as_clopper_and_pearson_do():
    t_low, f_high = Rates(90, 100, 5, 80).bounds(0.9)
    assert stats.binom.sf(89, 100, t_low) == pytest.approx(0.05)  # At t_low, 90 or more are as rare as that.
    assert stats.binom.cdf(5, 80, f_high) == pytest.approx(0.05)
    assert Rates(0, 10, 10, 10).epsilon(1e-5, 0.95) == 0.0
    assert Rates(50, 100, 50, 100).epsilon(1e-5, 0.95) == 0.0


@pytest.mark.parametrize("counts", [(95, 100, 3, 100), (97, 100, 5, 100)])
def test_both_ways_of_telling_count(counts):
    t_low, f_high = Rates(*counts).bounds(0.95)
    expected = max(math.log((t_low - 1e-5) / f_high), math.log((1 - f_high - 1e-5) / (1 - t_low)))
    assert Rates(*counts).epsilon(1e-5, 0.95) == expected


@pytest.mark.parametrize("sigma, steps", [(1.0, 1), (2.0, 9), (0.5, 1)])
def test_the_trade_off_of_gaussians_is_the_closed_form_from_below(sigma, steps):
    mu = math.sqrt(steps) / sigma
    for a in (0.01, 0.1, 0.5, 0.9):
        exact = stats.norm.cdf(stats.norm.ppf(1 - a) - mu)
        found = bounds.trade_off(sigma, 1.0, steps, a)
        assert exact - 0.01 <= found <= exact + 1e-6


def test_a_perfect_attack_in_one_run_has_the_bound_of_a_binomial():
    # r right guesses of r: refuted while p^r <= 0.05.
    epsilon = bounds.one_run_epsilon(100, 100, 100, delta=0.0, confidence=0.95)
    assert (1 / (1 + math.exp(-epsilon))) ** 100 == pytest.approx(0.05, rel=1e-3)
    assert bounds.one_run_epsilon(100, 100, 100, delta=1e-4, confidence=0.95) < epsilon
    assert bounds.one_run_epsilon(50, 100, 100, delta=1e-5, confidence=0.95) == 0.0


def test_a_bound_of_one_run_holds_for_randomized_response():
    """Which is epsilon-DP, and whose answers are the best guesses there are."""
    epsilon, generator = 1.0, np.random.default_rng(0)
    correct = generator.binomial(200, 1 / (1 + math.exp(-epsilon)), size=100)
    found = [bounds.one_run_epsilon(int(v), 200, 200, delta=0.0, confidence=0.9) for v in correct]
    assert stats.binomtest(int(np.sum(np.array(found) > epsilon)), 100, 0.1, "greater").pvalue > 1e-3
    assert np.median(found) > 0.6


# The worst case.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_canary_is_clipped_to_the_clip_norm_in_a_coordinate_of_its_own(name):
    """With hardly any noise and full batches, what a step releases says who is in, exactly."""
    optimizer = OPTIMIZERS[name](noise_multiplier=1e-3)
    found = audited(optimizer, batch_size=60, num_canaries=40, epochs=4)
    inside, outside = found.scores[found.included], found.scores[~found.included]
    assert inside.min() > outside.max() and not np.isnan(found.scores).any()
    # z is 1 for those inside and 0 for those outside, so the evidence of a step is (2 z - 1) / (2 sigma^2).
    np.testing.assert_allclose(inside, 4 / 2e-6, rtol=0.02)
    np.testing.assert_allclose(outside, -4 / 2e-6, rtol=0.02)


@pytest.mark.parametrize("clip", [1.0, 1000.0])
def test_the_steps_of_a_pilot_are_heard_too(clip):
    """12 of 16."""
    optimizer = PILOTED(l2_norm_clip=clip, noise_multiplier=1e-3)
    found = audited(optimizer, batch_size=60, num_canaries=40, epochs=16)
    np.testing.assert_allclose(np.abs(found.scores), 16 / 2e-6, rtol=0.02)
    np.testing.assert_array_equal(found.scores > 0, found.included)


@pytest.mark.parametrize("how", [{"method": "ghost"}, {"method": "vectorized", "physical_batch_size": 64}])
def test_an_audit_is_nearly_tight(how):
    optimizer = OPTIMIZERS["DP2RMSprop"](noise_multiplier=4.0, noise_seed=0)
    found = audited(optimizer, batch_size=2020, num_canaries=2000, epochs=16, confidence=0.9, how=how)
    assert found.steps == 16 and found.lower_bound <= 1.1 * found.epsilon
    assert 0.6 * found.epsilon < found.lower_bound


def without_noise_where(optimizer, condition, monkeypatch):
    mean = type(optimizer)._private_mean

    def broken(self, clipped, stream, draw):
        import tensorflow as tf

        noisy, bare = mean(self, clipped, stream, draw), [v / self._batch_size for v in clipped.values]
        return [tf.where(condition(self), b, n) for b, n in zip(bare, noisy)]

    monkeypatch.setattr(type(optimizer), "_private_mean", broken)


@pytest.mark.parametrize("name", ["DP2RMSprop", "DP2Yogi"])
def test_an_adaptive_phase_without_noise_is_found_out(name, monkeypatch):
    optimizer = OPTIMIZERS[name](noise_multiplier=4.0, noise_seed=0)
    without_noise_where(optimizer, lambda self: self.phase() > 0, monkeypatch)
    found = audited(optimizer, epochs=2)
    assert found.epsilon < 2 < found.lower_bound and not found.passed
    assert "REFUTES" in str(found)


def test_a_pilot_without_noise_is_found_out(monkeypatch):
    """18 steps of 20."""
    optimizer = PILOTED(noise_multiplier=4.0, noise_seed=0)
    without_noise_where(optimizer, lambda self: self._is_pilot(), monkeypatch)
    found = audited(optimizer, epochs=2)
    assert found.epsilon < 2 < found.lower_bound and not found.passed


def test_the_model_is_not_trained():
    model = model_of(OPTIMIZERS["DPSGD"](noise_multiplier=1.0))
    weights = model.get_weights()
    dp2.audit(model, X, Y, batch_size=30, num_canaries=20)
    assert model.ledger.steps == 0
    np.testing.assert_array_equal(weights[0], model.get_weights()[0])


# What a trained model shows.


def test_examples_that_are_memorised_are_found():
    labels = np.where(np.arange(500) % 2, 1.0, -1.0).astype(np.float32)
    rows = np.eye(500, dtype=np.float32)  # A coordinate each: hardly any noise hides nothing.
    model = dp2.DP2Sequential([keras.Input((500,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(dp2.DPSGD(50.0, 1.0, noise_multiplier=0.05, noise_seed=0), loss="mse")
    found = dp2.audit(
        model, rows, labels, batch_size=100, epochs=2, kind="examples", num_canaries=300, delta=1e-5, seed=0
    )
    assert found.lower_bound > 1.0 and found.passed and found.steps == 10


@pytest.mark.parametrize(
    "change, words",
    [
        ({"kind": "rumours"}, "`kind` must be one of 'gradients', 'examples'. Received: kind='rumours'"),
        ({"confidence": 1.0}, "`confidence` must be"),
        ({"num_canaries": 0}, "`num_canaries` must be a positive integer"),
        ({"kind": "examples", "num_canaries": 20}, "`num_canaries` must be below the number of examples, 20"),
    ],
)
def test_arguments_out_of_range_are_refused(change, words):
    model = model_of(OPTIMIZERS["DPSGD"](noise_multiplier=1.0))
    with pytest.raises(ValueError, match=words):
        dp2.audit(model, X, Y, **{"batch_size": 10, **change})


def test_what_has_no_claim_is_refused():
    with pytest.raises(ValueError, match="must be a private model, compiled"):
        dp2.audit(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), X, Y, batch_size=10)
    with pytest.raises(ValueError, match="`noise_multiplier` must be a number above 0"):
        dp2.audit(model_of(OPTIMIZERS["DPSGD"](noise_multiplier=0.0)), X, Y, batch_size=10)


def test_the_plot_shows_both_histograms():
    pytest.importorskip("matplotlib")
    found = audited(OPTIMIZERS["DPSGD"](noise_multiplier=1.0), num_canaries=100)
    axes = found.plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["canary out", "canary in"]


@pytest.mark.parametrize("loss, classes", [("mse", 1), ("sparse_categorical_crossentropy", 4)])
def test_the_command_audits_a_saved_model(tmp_path, capsys, loss, classes):
    model = dp2.DP2Sequential([keras.Input((3,)), keras.layers.Dense(classes, "softmax")])
    model.compile(OPTIMIZERS["DP2RMSprop"](noise_multiplier=1.0), loss=loss)
    path = str(tmp_path / "model.keras")
    model.save(path)
    arguments = ["audit", path, "--batch-size", "58", "--num-canaries", "100"]
    assert cli.main([*arguments, "--plot", str(tmp_path / "scores.png")]) == 0
    assert "100 canaries (gradients), 2 steps" in capsys.readouterr().out
    assert (tmp_path / "scores.png").stat().st_size > 0


def test_the_command_fails_where_the_claim_is_refuted(monkeypatch, capsys):
    refuted = dp2.Audit("gradients", 1.0, 2.5, 1e-5, 0.95, 100, 10, np.zeros(100), np.zeros(100, bool))
    monkeypatch.setattr("dp2_keras.auditing.command.run", lambda arguments: refuted)
    assert cli.main(["audit", "model.keras", "--batch-size", "10"]) == 1
    assert "REFUTES the claimed 1.000" in capsys.readouterr().err


def test_canaries_are_rows_after_the_ordinary_ones():
    x, y, weights = canaries.rows(X, Y, np.array([True, False]), l2_norm_clip=2.0)
    assert [len(part) for part in (*x, *y, *weights)] == [22] * 7
    np.testing.assert_array_equal(x[1][-3:, 0], [0, 0, 1])
    np.testing.assert_array_equal(x[2][-3:, 0], [0.0, 2e6, 2e6])
    np.testing.assert_array_equal(weights[0][-3:], [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(weights[1][-3:], [0.0, 1.0, 0.0])


def test_the_clip_norm_is_the_one_in_force_and_not_that_of_the_canaries_loss():
    model = dp2.DP2Sequential([keras.Input((3,)), keras.layers.Dense(10_000)])
    model.compile(dp2.DP2NoiseFloor(0.1, noise_multiplier=1.0), loss="mse")
    listener = canaries.listening(model.optimizer, sampling_rate=0.1)
    listener.settle_clip(["mse", canaries.pull_at_own_weight], [(None, 10_000), (None, 1)])
    assert listener.largest_clip() == model.optimizer.l2_norm_clip == pytest.approx(0.04)
