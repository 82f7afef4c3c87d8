"""Files and checkpoints: a private model goes on where it stopped.

Resumed means: the same weights, G, v, step and phase, and with `noise_seed` every later
step bit for bit.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import flat_weights
from saved import (
    BATCH,
    DELAY,
    FEATURES,
    KERAS_3,
    assert_resumes,
    assert_same,
    batch,
    compiled,
    dp2_rmsprop,
    each_class,
    each_model,
    each_optimizer,
    layers,
    least,
    optimizer_of,
    public_data_for,
    run_python,
    state,
    train,
)

import dp2_keras as dp2

# The `.keras` file.


def save_and_load(model, path):
    model.save(path / "model.keras")
    return keras.models.load_model(path / "model.keras")


@each_model
def test_a_loaded_model_resumes_inside_a_phase(tmp_path, kind):
    model = compiled(kind)
    train(model, 0, 2)
    from_sgd_phase = save_and_load(model, tmp_path)
    train(model, 2, 4)
    from_adaptive_phase = save_and_load(model, tmp_path)
    assert type(from_sgd_phase) is type(from_adaptive_phase) is type(model)
    assert_resumes(model, from_adaptive_phase, 4)
    train(from_sgd_phase, 2, 8)
    assert_same(state(model), state(from_sgd_phase))


def test_a_loaded_model_resumes_at_every_turn(tmp_path):
    model, loaded, done = compiled(), {}, 0
    for step in (1, DELAY, 2 * DELAY - 1, 2 * DELAY):
        train(model, done, step)
        loaded[step], done = save_and_load(model, tmp_path), step
        assert_same(state(model), state(loaded[step]))
    for step, one in loaded.items():
        train(one, step, done)
        assert_same(state(model), state(one))


@each_optimizer
def test_every_optimizer_resumes(tmp_path, name):
    model = compiled(optimizer=optimizer_of(name))
    train(model, 0, 4)
    loaded = save_and_load(model, tmp_path)
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    if model.optimizer.public_gradients is not None:  # It is in no file.
        loaded.compile(loaded.optimizer, loss="mse", **public_data_for(loaded.optimizer))
    assert_resumes(model, loaded, 4)


@pytest.mark.parametrize("step, phase", [(2, dp2.Phase.SGD), (4, dp2.Phase.ADAPTIVE)])
def test_gradient_sum_second_moment_step_and_phase_come_back(tmp_path, step, phase):
    model = compiled()
    train(model, 0, DELAY + DELAY + step)
    before, after = model.optimizer, save_and_load(model, tmp_path).optimizer
    for name in ("_gradient_sums", "_second_moments"):
        pairs = list(zip(getattr(before, name), getattr(after, name)))
        assert len(pairs) == len(model.trainable_variables)
        for one, other in pairs:
            np.testing.assert_array_equal(one.numpy(), other.numpy())
    summed = any(np.any(v.numpy()) for v in after._gradient_sums)
    assert summed == (phase is dp2.Phase.SGD)  # G fills in the SGD phase, and is empty after it.
    assert all(np.all(v.numpy() > 0) for v in after._second_moments)
    assert int(after.iterations) == DELAY + DELAY + step
    assert float(after.phase()) == phase


@each_class
def test_compile_options_come_back(tmp_path, kind):
    model = compiled(kind, physical_batch_size=3, method="loop", diagnostics=False, metrics=["mae"])
    train(model, 0, 1)
    loaded = save_and_load(model, tmp_path)
    assert (loaded.physical_batch_size, loaded.method, loaded.diagnostics) == (3, "loop", False)
    assert set(train(loaded, 1, 2)[0]) == set(train(model, 1, 2)[0]) >= {"loss", "mae"}
    assert_same(state(model), state(loaded))


def test_a_model_that_has_not_started_comes_back(tmp_path):
    model = compiled(build=False)
    loaded = save_and_load(model, tmp_path)
    assert (loaded.physical_batch_size, loaded.method, loaded.diagnostics) == (None, "auto", True)
    assert {"phase", "clipped_fraction", "scaled_norm"} <= set(train(loaded, 0, 1)[0])
    train(model, 0, 1)
    assert_same(state(model), state(loaded))


def test_changed_rates_and_schedules_are_saved(tmp_path):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 4, 0.5)
    model = compiled(optimizer=dp2_rmsprop(learning_rate=schedule))
    train(model, 0, 4)
    model.optimizer.sgd_learning_rate = 2.0
    loaded = save_and_load(model, tmp_path)
    assert loaded.optimizer.get_config()["learning_rate"]["config"] == schedule.get_config()
    assert float(loaded.optimizer.sgd_learning_rate) == 2.0
    assert_resumes(model, loaded, 4)


def test_no_clip_is_saved_as_infinity(tmp_path):
    model = compiled(optimizer=dp2.DPSGD(0.1, np.inf, 0.0, expected_batch_size=BATCH, noise_seed=1))
    train(model, 0, 1)
    loaded = save_and_load(model, tmp_path)
    assert loaded.optimizer.l2_norm_clip == np.inf
    assert_resumes(model, loaded, 1, last=3)


def test_fit_goes_on_where_it_stopped(tmp_path):
    x, y = (np.concatenate(arrays) for arrays in zip(*map(batch, range(5))))
    fit = dict(
        batch_size=BATCH, verbose=0
    )  # Poisson batches are a function of the step. B is fit's, and is stated again.
    model = compiled(optimizer=dp2_rmsprop(expected_batch_size=None))
    model.fit(x, y, epochs=1, **fit)
    loaded = save_and_load(model, tmp_path)
    for one in (model, loaded):
        one.fit(x, y, epochs=2, initial_epoch=1, **fit)
    assert_same(state(model), state(loaded))
    assert int(loaded.optimizer.iterations) == 10


def test_a_model_loaded_without_its_optimizer_is_private_still(tmp_path):
    model = compiled()
    train(model, 0, 2)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert type(loaded) is dp2.DP2Sequential
    np.testing.assert_array_equal(flat_weights(loaded), flat_weights(model))
    with pytest.raises(ValueError, match="would train without privacy"):
        loaded.compile(optimizer="sgd", loss="mse")
    loaded.compile(optimizer=dp2_rmsprop(), loss="mse")
    train(loaded, 0, 1)


def test_model_checkpoint_callback(tmp_path):
    x, y = (np.concatenate(arrays) for arrays in zip(*map(batch, range(4))))
    model = compiled()
    save = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[save])
    loaded = keras.models.load_model(tmp_path / "1.keras")
    assert int(loaded.optimizer.iterations) == 4
    loaded.fit(x, y, batch_size=BATCH, epochs=2, initial_epoch=1, verbose=0)
    assert_same(state(model), state(loaded))


def test_another_process_resumes_bit_for_bit(tmp_path):
    model = compiled()
    train(model, 0, 4)
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "batches.npz", *[array for t in range(4, 9) for array in batch(t)])
    run_python(
        """
        import keras, numpy as np, dp2_keras
        model = keras.models.load_model(r"{path}/model.keras")
        batches = list(np.load(r"{path}/batches.npz").values())
        for x, y in zip(batches[::2], batches[1::2]):
            model.train_on_batch(x, y)
        model.save(r"{path}/model.keras")
        """,
        path=tmp_path,
    )
    train(model, 4, 9)
    assert_same(state(model), state(keras.models.load_model(tmp_path / "model.keras")))


# Weights alone.


@each_model
def test_weights_alone_resume_too(tmp_path, kind):
    model = compiled(kind)
    train(model, 0, 4)
    model.save_weights(tmp_path / "model.weights.h5")
    resumed = compiled(kind, build=False)
    resumed.load_weights(tmp_path / "model.weights.h5")
    assert_resumes(model, resumed, 4)


def test_weights_alone_take_a_model_back(tmp_path):
    model = compiled()
    train(model, 0, 4)
    model.save_weights(tmp_path / "model.weights.h5")
    train(model, 4, 8)
    once = state(model)
    model.load_weights(tmp_path / "model.weights.h5")
    assert int(model.optimizer.iterations) == 4
    train(model, 4, 8)
    assert_same(once, state(model))


@pytest.mark.skipif(KERAS_3, reason="Keras 3 has no weights in TensorFlow's format")
def test_weights_in_tensorflow_format_resume_too(tmp_path):
    model = compiled()
    train(model, 0, 4)
    model.save_weights(tmp_path / "weights", save_format="tf")
    resumed = compiled(build=False)
    resumed.load_weights(tmp_path / "weights")
    resumed.optimizer.build(resumed.trainable_variables)
    assert_resumes(model, resumed, 4)


@pytest.mark.parametrize("other", ["adam", "rmsprop", None])
def test_another_optimizers_state_is_not_taken_for_ours(tmp_path, other):
    # Adam's state has as many variables as DP2-RMSprop's, and RMSprop's as many as
    # DP-RMSprop's; Keras loads by their number.
    plain = keras.Sequential([keras.Input((FEATURES,)), *layers()], name="net")
    if other is not None:
        plain.compile(optimizer=other, loss="mse")
        train(plain, 0, 2)
    plain.save_weights(tmp_path / "plain.weights.h5")
    for name in ("DP2RMSprop", "DPRMSprop", "DPAdam"):
        model = compiled(optimizer=least(name), build=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.load_weights(tmp_path / "plain.weights.h5")
        warned = [w for w in caught if f"{name} keeps the state it has" in str(w.message)]
        assert len(warned) == (other is not None)
        np.testing.assert_array_equal(flat_weights(model), flat_weights(plain))
        assert int(model.optimizer.iterations) == 0
        assert not any(np.any(v.numpy()) for v in model.optimizer._second_moments)


# TensorFlow's checkpoints.


@each_class
def test_a_checkpoint_resumes(tmp_path, kind):
    model = compiled(kind)
    train(model, 0, 4)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "ckpt"))
    resumed = compiled(kind, build=False)
    status = tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).restore(path)
    resumed.optimizer.build(resumed.trainable_variables)
    status.assert_existing_objects_matched()
    assert_resumes(model, resumed, 4)


def test_a_checkpoint_takes_a_model_back(tmp_path):
    model, paths = compiled(), {}
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    for step in range(1, 8):
        train(model, step - 1, step)
        paths[step] = checkpoint.save(str(tmp_path / "ckpt"))
    once = state(model)
    for step, path in paths.items():
        checkpoint.restore(path)
        assert int(model.optimizer.iterations) == step
        train(model, step, 7)
        assert_same(once, state(model))


class Interrupt(keras.callbacks.Callback):
    """Stops the process, as it were, before an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind, steps", [("sequential", 2), ("wrapper", 4)])  # ADAPTIVE, SGD
def test_backup_and_restore_resumes_an_interrupted_fit(tmp_path, kind, steps):
    x, y = (np.concatenate(arrays) for arrays in zip(*map(batch, range(steps))))

    def fit(model, *callbacks):
        model.fit(x, y, batch_size=BATCH, epochs=4, verbose=0, callbacks=list(callbacks))

    backup = lambda: keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))  # noqa: E731
    uninterrupted, interrupted, resumed = (compiled(kind, build=False) for _ in range(3))
    interrupted.set_weights(uninterrupted.get_weights())
    fit(uninterrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(interrupted, backup(), Interrupt(epoch=2))
    assert int(interrupted.optimizer.iterations) == 2 * steps
    fit(resumed, backup())
    assert int(resumed.optimizer.iterations) == 4 * steps
    assert_same(state(uninterrupted), state(resumed))
