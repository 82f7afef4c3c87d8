"""DP2NoiseFloor without a setting: rates with which the noise of all steps moves a weight by r = 0.5."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import dp2_keras as dp2
from dp2_keras.shrinkage import shrunk

N, BATCH, FEATURES = 200, 20, 4_000
X, Y = np.ones([N, FEATURES], np.float32), np.zeros([N, 1], np.float32)


def private_model(optimizer, features=FEATURES):
    model = dp2.DP2Sequential([keras.Input((features,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(optimizer, loss="mse")
    return model


def fit(model, x=X, y=Y, **kwargs):
    return model.fit(x, y, verbose=0, **{"batch_size": BATCH, "epochs": 3, **kwargs})


class Rates(keras.callbacks.Callback):
    """The rate of each step."""

    def on_train_begin(self, logs=None):
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(float(np.asarray(self.model.optimizer._rate(None))))


def rates(model, **kwargs):
    watch = Rates()
    fit(model, callbacks=[watch, *kwargs.pop("callbacks", [])], **kwargs)
    return watch.seen


def expected_rates(steps, sigma=1.0, clip=4.0, r=0.5):
    left = np.arange(steps, 0, -1)
    return r * left / (sigma * clip / BATCH * np.sqrt(np.sum(left**2)))


@pytest.mark.parametrize("clip, sigma, epochs, r", [(0.3, 1.0, 3, 0.5), (2.0, 0.5, 1, 0.2)])
def test_rates_are_the_equations(clip, sigma, epochs, r):
    model = private_model(dp2.DP2NoiseFloor(l2_norm_clip=clip, noise_multiplier=sigma, weight_noise=r))
    seen = rates(model, epochs=epochs)
    np.testing.assert_allclose(seen, expected_rates(epochs * N // BATCH, sigma, clip, r), rtol=1e-6)
    assert model.optimizer.path_variance == pytest.approx(r**2, rel=1e-5)


def test_the_noise_of_all_steps_moves_a_weight_by_half():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.3, noise_seed=5, shrinkage=0))
    fit(model, sample_weight=np.zeros(N, np.float32))  # No gradient: all that is left is the noise.
    weights = model.get_weights()[0]
    assert np.std(weights) == pytest.approx(0.5, rel=4 / (2 * FEATURES) ** 0.5)
    assert abs(np.mean(weights)) < 4 * 0.5 / FEATURES**0.5


def test_noise_in_the_weights_is_less_where_a_pilot_found_long_inputs():
    """R r, and nowhere more than r."""
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.3, noise_seed=5, shrinkage=0))
    optimizer, half = model.optimizer, FEATURES // 2
    optimizer.build(model.trainable_variables)
    scales = np.repeat([[2 / 4], [2 * 4]], half, axis=0).astype(np.float32)
    optimizer._log_scales[0].assign(np.log(scales))
    fit(model, sample_weight=np.zeros(N, np.float32))
    weights = model.get_weights()[0]
    for part, stretch in ((weights[:half], 1 / 4), (weights[half:], 1)):
        assert np.std(part) == pytest.approx(0.5 * stretch, rel=4 / (2 * half) ** 0.5)


def test_weights_that_have_nothing_but_noise_hardly_move():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.3, noise_seed=5))
    fit(model, sample_weight=np.zeros(N, np.float32))
    q = np.random.default_rng(0).normal(size=10**6)
    deviation = 0.5 * np.sqrt(np.mean((q**3 / (q**2 + 4)) ** 2))  # Of h(z), z normal; 0.16.
    assert np.std(model.get_weights()[0]) == pytest.approx(deviation, rel=0.15)


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5),
    st.floats(0, 1e6, width=32),
    st.floats(0, 100, width=32),
)
def test_shrinking_keeps_the_sign_and_never_lengthens(path, variance, strength):
    found = shrunk(tf.constant(path, tf.float32), tf.constant(variance, tf.float32), strength).numpy()
    assert np.all(np.isfinite(found))
    assert np.all(found * np.sign(path) >= 0)
    assert np.all(np.abs(found) <= np.abs(np.float32(path)) * (1 + 1e-6))


def test_a_path_of_sqrt_k_deviations_moves_a_weight_half_as_far():
    path = tf.constant([-6.0, 6.0, 0.0, 1e30, -1e-30])
    np.testing.assert_allclose(shrunk(path, 4.0, 9.0), [-3.0, 3.0, 0.0, 1e30, 0.0], atol=1e-20)
    rising = shrunk(tf.linspace(-9.0, 9.0, 1001), 1.0, 4.0).numpy()
    assert np.all(np.diff(rising) > 0)


def test_weights_that_a_callback_has_set_are_where_the_path_goes_on():
    """The weights move by what h(z) moves, from wherever they are."""

    class Shift(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.model.set_weights([w + 1.0 for w in self.model.get_weights()])

    weights = []
    for callbacks in ([], [Shift()]):
        model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0, noise_seed=5), features=20)
        idle = np.zeros(N, np.float32)
        fit(model, X[:, :20], sample_weight=idle, callbacks=callbacks)
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(weights[1], weights[0] + 1.0, atol=1e-5)


def test_epsilon_is_all_that_needs_to_be_said():
    model = private_model(dp2.DP2NoiseFloor())
    seen = rates(model, callbacks=[dp2.PrivacyBudget(epsilon=2.0, delta=1e-3)])
    assert model.privacy_spent(1e-3) == pytest.approx(2.0, rel=1e-3)
    np.testing.assert_allclose(seen, expected_rates(30, model.optimizer.sigma), rtol=1e-6)


def test_a_resumed_fit_has_the_rates_of_the_whole():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0))
    fit(model, epochs=2)
    seen = rates(model, initial_epoch=2, epochs=3)
    np.testing.assert_allclose(seen, expected_rates(30)[20:], rtol=1e-6)


def test_a_second_fit_has_rates_of_its_own():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0))
    np.testing.assert_allclose(rates(model, epochs=1), expected_rates(10), rtol=1e-6)
    np.testing.assert_allclose(rates(model, epochs=4), expected_rates(40), rtol=1e-6)
    assert model.optimizer.path_variance == pytest.approx(2 * 0.5**2, rel=1e-5)


def test_a_rate_that_is_given_stays():
    model = private_model(dp2.DP2NoiseFloor(0.25, noise_multiplier=1.0))
    fit(model)
    assert float(np.asarray(model.optimizer.learning_rate)) == 0.25


def test_a_rate_that_is_set_later_stays_too(tmp_path):
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0, expected_batch_size=BATCH))
    for rate in (0.5, 0.25):
        model.optimizer.learning_rate = rate
        model.train_on_batch(X[:BATCH], Y[:BATCH])
    assert set(rates(model)) == {0.25}
    assert model.optimizer.get_config()["learning_rate"] == 0.25
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert int(again.iterations.numpy()) == 32 and again.path_variance == model.optimizer.path_variance > 0


def test_a_learning_rate_scheduler_sets_the_rate_of_each_epoch():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0))
    halving = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 ** (epoch + 1))
    assert rates(model, callbacks=[halving]) == [0.5] * 10 + [0.25] * 10 + [0.125] * 10


def test_a_step_after_fit_has_no_rate_and_is_not_paid():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0))
    fit(model)
    with pytest.raises(ValueError, match='`learning_rate="auto"` is settled by `fit`'):
        model.train_on_batch(X[:BATCH], Y[:BATCH])
    assert model.ledger.steps == 30


def test_an_interrupted_fit_goes_on_with_the_rates_of_the_whole(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) == 15:
                raise KeyboardInterrupt

    backup = lambda: keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))  # noqa: E731
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0, noise_seed=1))
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[backup(), Interrupt()])
    seen = rates(model, callbacks=[backup()])
    np.testing.assert_allclose(seen, expected_rates(30)[10:], rtol=1e-6)
    assert model.optimizer.path_variance == pytest.approx(0.25, rel=1e-5)


def test_a_budget_that_is_spent_is_refused_as_ever():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=0.1))
    with pytest.raises(dp2.BudgetExhaustedError):
        fit(model, callbacks=[dp2.PrivacyBudget(epsilon=0.01, delta=1e-3)])


@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_a_new_process_goes_on_with_the_rates_of_the_whole(tmp_path, save_freq):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) == 17:
                raise KeyboardInterrupt

    backup = lambda: keras.callbacks.BackupAndRestore(str(tmp_path / "b"), save_freq=save_freq)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        fit(private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0)), callbacks=[backup(), Stop()])
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0))  # As a new process would make it.
    seen = rates(model, callbacks=[backup()])
    np.testing.assert_allclose(seen[-10:], expected_rates(30)[-10:], rtol=1e-6)
    assert model.optimizer.path_variance == pytest.approx(0.25, rel=1e-5)


def test_rates_fall_to_0_within_the_steps_that_the_budget_pays():
    model = private_model(dp2.DP2NoiseFloor(noise_multiplier=1.0))
    seen = rates(model, epochs=10, callbacks=[dp2.PrivacyBudget(epsilon=3.5, delta=1e-3)])
    assert 0 < len(seen) < 100
    np.testing.assert_allclose(seen, expected_rates(len(seen)), rtol=1e-6)


def test_a_layer_that_was_frozen_has_the_noise_of_its_own_steps():
    model = dp2.DP2Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(dp2.DP2NoiseFloor(0.1, noise_multiplier=1.0), loss="mse")
    fit(model, X[:, :4], epochs=1)
    optimizer, before = model.optimizer, model.optimizer.path_variance
    model.layers[0].trainable = False
    model.compile(optimizer, loss="mse")
    fit(model, X[:, :4], epochs=1)
    variances = [float(v.numpy()) for v in optimizer._path_variances]
    assert variances == pytest.approx([before, before, 2 * before, 2 * before])


def test_a_step_that_fails_leaves_no_noise():
    model = dp2.DP2Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(5, 3)])
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(1))
    model.compile(dp2.DP2NoiseFloor(0.1, noise_multiplier=1.0, expected_batch_size=2), loss="mse")
    tokens, y = np.array([[0, 1], [2, 3]], np.int32), np.zeros((2, 1), np.float32)
    model.train_on_batch(tokens, y)
    of_one = model.optimizer.path_variance
    with pytest.raises(Exception, match="(?i)indices|range"):
        model.train_on_batch(tokens + 100, y)
    assert model.optimizer.path_variance == of_one


def test_decay_and_regularisers_are_not_shrunk():
    """They are free of noise: without a gradient, w is w_0 times (1 - lr decay)^steps, and h(z)."""
    weights = []
    for shrinkage in (0.0, 4.0):
        optimizer = dp2.DP2NoiseFloor(
            1e-3, 1e-3, noise_multiplier=1.0, shrinkage=shrinkage, weight_decay=50.0
        )
        model = dp2.DP2Sequential(
            [keras.Input((20,)), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)]
        )
        model.compile(optimizer, loss="mse")
        fit(model, X[:, :20], sample_weight=np.zeros(N, np.float32))
        weights.append(model.get_weights()[0])
    for found in weights:
        np.testing.assert_allclose(found, np.full((20, 1), 0.95**30), rtol=1e-4)


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
    np.testing.assert_allclose(rates(again, epochs=4), expected_rates(40), rtol=1e-6)


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


@pytest.mark.parametrize("name, value", [("weight_noise", 0.0), ("weight_noise", None), ("shrinkage", -1.0)])
def test_what_is_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        dp2.DP2NoiseFloor(noise_multiplier=1.0, **{name: value})
