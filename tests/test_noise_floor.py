"""DP2NoiseFloor without a setting: lr = r B / (sigma C sqrt(T)), so that noise moves a weight by r = 0.3."""

import keras
import numpy as np
import pytest

import dp2_keras as dp2

N, BATCH, FEATURES = 200, 20, 4_000
X, Y = np.ones([N, FEATURES], np.float32), np.zeros([N, 1], np.float32)


def private_model(optimizer, features=FEATURES):
    model = dp2.DP2Sequential([keras.Input((features,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(optimizer, loss="mse")
    return model


def fit(model, x=X, y=Y, **kwargs):
    return model.fit(x, y, verbose=0, **{"batch_size": BATCH, "epochs": 3, **kwargs})


def rate(model):
    return float(np.asarray(model.optimizer.learning_rate))


@pytest.mark.parametrize("clip, sigma, epochs", [(0.3, 1.0, 3), (2.0, 0.5, 1)])
def test_the_rate_is_the_equations(clip, sigma, epochs):
    model = private_model(dp2.DP2NoiseFloor(l2_norm_clip=clip, noise_multiplier=sigma))
    fit(model, epochs=epochs)
    steps = epochs * N // BATCH
    assert rate(model) == pytest.approx(0.3 * BATCH / (sigma * clip * steps**0.5))


def test_the_noise_of_all_steps_moves_a_weight_by_three_tenths():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.3, noise_seed=5))
    fit(model, sample_weight=np.zeros(N, np.float32))  # No gradient: all that is left is the noise.
    weights = model.get_weights()[0]
    assert np.std(weights) == pytest.approx(0.3, rel=4 / (2 * FEATURES) ** 0.5)
    assert abs(np.mean(weights)) < 4 * 0.3 / FEATURES**0.5


def test_epsilon_is_all_that_needs_to_be_said():
    model = private_model(dp2.DP2NoiseFloor())
    fit(model, callbacks=[dp2.PrivacyBudget(epsilon=2.0, delta=1e-3)])
    assert model.privacy_spent(1e-3) == pytest.approx(2.0, rel=1e-3)
    assert rate(model) == pytest.approx(0.3 * BATCH / (model.optimizer.sigma * 0.3 * 30**0.5))


def test_a_resumed_fit_has_the_rate_of_the_whole():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0))
    fit(model)
    whole = rate(model)
    fit(model, initial_epoch=2)
    assert rate(model) == whole


def test_a_longer_fit_has_a_rate_of_its_own():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0))
    fit(model)
    short = rate(model)
    fit(model, epochs=12)
    assert rate(model) == pytest.approx(short / 2)


def test_a_rate_that_is_given_stays():
    model = private_model(dp2.DP2NoiseFloor(0.25, noise_multiplier=1.0))
    fit(model)
    assert rate(model) == 0.25


def test_a_rate_that_is_set_later_stays_too():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0, expected_batch_size=BATCH))
    model.optimizer.learning_rate = 0.25
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    fit(model)
    assert rate(model) == model.optimizer.get_config()["learning_rate"] == 0.25


def test_a_fit_of_no_epochs_takes_no_step():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0))
    fit(model, epochs=0)
    assert model.ledger.steps == 0


def test_auto_is_still_auto_in_the_config_and_in_a_file(tmp_path):
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0))
    fit(model)
    assert model.optimizer.get_config()["learning_rate"] == "auto"
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == model.optimizer.get_config()
    fit(again, epochs=12)
    assert rate(again) == pytest.approx(rate(model) / 2)


def test_a_step_before_fit_has_no_rate():
    optimizer = dp2.DP2NoiseFloor(noise_multiplier=1.0, expected_batch_size=BATCH)
    model = private_model(optimizer)
    with pytest.raises(ValueError, match='`learning_rate="auto"` is settled by `fit`'):
        model.train_on_batch(X[:BATCH], Y[:BATCH])
    assert not any(np.any(w) for w in model.get_weights())


def test_batches_without_end_need_their_number():
    def batches():
        while True:
            yield X[:BATCH], Y[:BATCH]

    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0, expected_batch_size=BATCH))
    with pytest.raises(ValueError, match='`steps_per_epoch` must be given for `learning_rate="auto"`'):
        model.fit(batches(), dataset_size=N, verbose=0)


@pytest.mark.parametrize("given", ["none", -1.0, None])
def test_other_words_are_refused(given):
    with pytest.raises(ValueError, match="learning_rate"):
        dp2.DP2NoiseFloor(given, noise_multiplier=1.0)


@pytest.mark.parametrize("power", [-0.1, 1.1, None, "half"])
def test_a_power_is_between_none_and_all(power):
    with pytest.raises(ValueError, match="`power` must be"):
        dp2.DP2NoiseFloor(noise_multiplier=1.0, power=power)
