"""What the optimizers share with Keras's: decay, averages, constraints, callbacks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import flat_weights, logistic_model

import dp2_keras as dp2
from dp2_keras import _keras

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = (X[:, :1] > 0).astype(np.float32)


def delayed(**arguments):
    return dp2.DP2RMSprop(2.0, 1.0, 0.0, delay=1, sgd_learning_rate=0.5, expected_batch_size=8, **arguments)


def step(model):
    before = flat_weights(model)
    model.train_on_batch(X, Y)
    return before, flat_weights(model)


def test_weight_decay_is_decoupled_and_at_the_rate_of_the_phase():
    plain, decayed = logistic_model(3, delayed()), logistic_model(3, delayed(weight_decay=0.1))
    for model in (plain, decayed):
        model.trainable_variables[0].assign(np.ones((3, 1)))
    for rate in (0.5, 2.0):
        (before, after), (_, decayed_after) = step(plain), step(decayed)
        np.testing.assert_allclose(after - decayed_after, rate * 0.1 * before, rtol=1e-4, atol=1e-6)
        decayed.set_weights(plain.get_weights())


def test_variables_can_be_left_out_of_weight_decay():
    model = logistic_model(3, delayed(weight_decay=0.1))
    optimizer = delayed(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    excluded = logistic_model(3, optimizer)
    for m in (model, excluded):
        m.set_weights([np.ones((3, 1)), np.ones(1)])
        m.train_on_batch(X, Y)
    difference = flat_weights(excluded) - flat_weights(model)
    np.testing.assert_allclose(difference, [0, 0, 0, 0.5 * 0.1], rtol=1e-4, atol=1e-6)


def test_a_moving_average_of_the_weights_replaces_them_at_the_end_of_fit():
    model = logistic_model(3, dp2.DPSGD(0.5, 1.0, 0.0, use_ema=True, ema_momentum=0.5))
    plain = logistic_model(3, dp2.DPSGD(0.5, 1.0, 0.0))
    path = [flat_weights(plain)]
    for _ in range(3):
        plain.fit(X, Y, batch_size=8, verbose=0)
        path.append(flat_weights(plain))
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0)
    average = path[1] if _keras.KERAS_3 else path[0]  # Keras 2 averages the initial weights too.
    for weights in path[1:]:
        average = 0.5 * average + 0.5 * weights
    np.testing.assert_allclose(flat_weights(model), average, atol=1e-6)


def test_constraints_hold_after_the_update():
    model = dp2.DP2Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, kernel_constraint=keras.constraints.NonNeg())]
    )
    model.compile(optimizer=dp2.DPSGD(1.0, 1.0, 5.0, expected_batch_size=1), loss="mse")
    model.train_on_batch(X, Y)
    assert np.all(model.trainable_variables[0].numpy() >= 0)


def test_a_learning_rate_scheduler_callback_sets_the_adaptive_rate():
    model = logistic_model(3, delayed())
    callback = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[callback])
    assert float(model.optimizer.learning_rate) == 0.5
    assert float(model.optimizer.sgd_learning_rate) == 0.5


def test_a_schedule_need_not_be_serialisable():
    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5 / (1.0 + tf.cast(step, tf.float32))

    model = logistic_model(3, dp2.DPSGD(Halving(), 1.0, 1.0))
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 2


def test_the_sgd_phase_takes_the_adaptive_values_by_default():
    optimizer = dp2.DP2Adagrad(0.3, 0.7, 1.0, delay=2)
    assert float(optimizer.sgd_learning_rate) == pytest.approx(0.3)
    assert [optimizer._privatizer(phase).l2_norm_clip for phase in dp2.Phase] == [0.7, 0.7]


def test_without_noise_and_clip_every_optimizer_trains():
    for make in (dp2.DPSGD, dp2.DPRMSprop, dp2.DPAdagrad, dp2.DPYogi, dp2.DPAdam):
        model = logistic_model(3, make(0.1, np.inf, 0.0))
        loss = model.fit(X, Y, batch_size=8, epochs=5, verbose=0).history["loss"]
        assert loss[-1] < loss[0]


def test_non_private_dp2_is_the_delayed_method_itself():
    model = logistic_model(3, dp2.DP2RMSprop(0.01, np.inf, 0.0, delay=1, eps=1e-3))
    loss = model.fit(X, Y, batch_size=8, epochs=6, verbose=0).history["loss"]
    assert loss[-1] < loss[0]


def test_one_optimizer_keeps_its_state_over_a_recompile():
    model = logistic_model(3, delayed())
    step(model)
    model.compile(optimizer=model.optimizer, loss="mse")
    step(model)
    assert int(model.optimizer.iterations) == 2


def test_weights_of_float64_decay_in_float64():
    start = keras.initializers.Constant(1 / 3)
    dense = keras.layers.Dense(1, kernel_initializer=start, use_bias=False, dtype="float64")
    model = dp2.DP2Sequential([keras.Input((2,), dtype="float64"), dense])
    model.compile(dp2.DPSGD(0.5, 1.0, 0.0, weight_decay=0.1, expected_batch_size=4), loss="mse")
    before = model.get_weights()[0]
    model.train_on_batch(np.zeros((4, 2)), np.zeros((4, 1)))
    assert before.dtype == np.float64
    np.testing.assert_allclose(model.get_weights()[0], before * 0.95, rtol=1e-14)
