"""A new key wherever there is a new optimizer, and no draw twice, whatever is copied or restored."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import flat_weights
from test_secrecy import (
    BATCH,
    FEATURES,
    KERAS_3,
    compiled,
    dp2_rmsprop,
    examples,
    fit,
    keras_file,
    key_of,
    name_of,
    weights_file,
)

import dp2_keras as dp2
from dp2_keras.noise import NoiseSource


def by_config(model, path):
    return type(model.optimizer).from_config(model.optimizer.get_config())


def by_loading(model, path):
    keras_file(model, path)
    return keras.models.load_model(path / "model.keras")


def by_deepcopy(model, path):
    return copy.deepcopy(model)


def by_pickle(model, path):
    return pickle.loads(pickle.dumps(model))


def by_clone(model, path):
    clone = keras.models.clone_model(model)
    return clone if KERAS_3 else by_config(model, path)  # Keras 2 does not compile a clone.


def by_deepcopy_of_optimizer(model, path):
    return copy.deepcopy(model.optimizer)


def by_pickle_of_optimizer(model, path):
    return pickle.loads(pickle.dumps(model.optimizer))


def by_copy_of_source(model, path):
    return copy.copy(model.optimizer._noise_source)


def by_deepcopy_of_source(model, path):
    return copy.deepcopy({"sources": [model.optimizer._noise_source]})["sources"][0]


def by_pickle_of_source(model, path):
    return pickle.loads(pickle.dumps(model.optimizer._noise_source))


COPIES = [by_config, by_loading, by_deepcopy, by_pickle, by_clone]
COPIES += [by_copy_of_source, by_deepcopy_of_source, by_pickle_of_source]
COPIES += [by_deepcopy_of_optimizer, by_pickle_of_optimizer] if KERAS_3 else []  # Keras 2 can do neither.
each_copy = pytest.mark.parametrize("copied", COPIES, ids=name_of)


@pytest.mark.filterwarnings("ignore:DP2RMSprop keeps the state")  # A copy without its model.
@each_copy
def test_a_copy_draws_a_key_of_its_own(tmp_path, copied):
    model = compiled()
    key = key_of(model)
    again = copied(model, tmp_path)
    assert not set(key_of(again)) & set(key)
    np.testing.assert_array_equal(key_of(model), key)


@pytest.mark.filterwarnings("ignore:DP2RMSprop keeps the state")
@each_copy
def test_a_copy_with_a_seed_repeats_it(tmp_path, copied):
    model = compiled(dp2_rmsprop(noise_seed=5))
    np.testing.assert_array_equal(key_of(copied(model, tmp_path)), key_of(model))


def test_keys_are_fresh_and_full():
    keys = np.concatenate([key_of(dp2_rmsprop()) for _ in range(50)])
    assert len(set(keys)) == 100
    for bit in range(64):  # Each bit is both 0 and 1 somewhere: the chance of a miss is 2^-93.
        assert len(set((keys >> np.uint64(bit)) & np.uint64(1))) == 2


def test_the_random_state_of_python_numpy_and_tensorflow_does_not_set_the_key():
    keys = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        keys.append(key_of(dp2_rmsprop()))
    assert not set(keys[0]) & set(keys[1])


def test_seeds_are_keys_apart():
    assert len({key_of(NoiseSource(seed)).tobytes() for seed in range(50)}) == 50


# Without a seed nothing is drawn twice, whatever is restored.


def steps_from(model, restore):
    """Where one step leads from a restored state, with nothing but the noise to tell."""
    restore()
    x, y = examples()
    model.train_on_batch(0.0 * x[:BATCH], 0.0 * y[:BATCH])
    return flat_weights(model)


def silent(seed):
    """No dropout and no signal: each update is noise alone."""
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(1, kernel_initializer="zeros")]
    model = dp2.DP2Sequential(layers, name="net")
    model.compile(optimizer=dp2_rmsprop(noise_seed=seed), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("how", ["checkpoint", "weights", "assignment"])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_restored_step_has_new_noise_unless_it_is_seeded(tmp_path, how, seed):
    model = silent(seed)
    steps_from(model, lambda: None)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = saved.save(str(tmp_path / "ckpt"))
    weights_file(model, tmp_path)
    start = model.get_weights()

    def restore():
        if how == "checkpoint":
            saved.restore(path)
        elif how == "weights":
            model.load_weights(tmp_path / "model.weights.h5")
        else:
            model.set_weights(start)
            model.optimizer.iterations.assign(1)

    first, second = steps_from(model, restore), steps_from(model, restore)
    assert int(model.optimizer.iterations) == 2
    restore()
    assert np.all(first != flat_weights(model))
    assert np.array_equal(first, second) == (seed is not None)


def test_the_draw_counter_only_grows(tmp_path):
    model = compiled()
    source = model.optimizer._noise_source
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = saved.save(str(tmp_path / "ckpt"))
    fit(model)
    drawn = int(source._draws)
    assert drawn >= 3
    saved.restore(path)
    assert int(source._draws) == drawn
    weights_file(model, tmp_path)
    model.load_weights(tmp_path / "model.weights.h5")
    assert int(source._draws) == drawn
    model.compile(optimizer=model.optimizer, loss="mse")
    fit(model)
    assert int(source._draws) >= drawn + 3


@pytest.mark.parametrize("seed", [None, 5])
def test_a_loaded_model_goes_on_with_new_noise_unless_it_is_seeded(tmp_path, seed):
    model = silent(seed)
    loaded = by_loading(model, tmp_path)
    one, other = (steps_from(m, lambda: None) for m in (model, loaded))
    assert np.any(one) and np.any(other)
    assert np.array_equal(one, other) == (seed is not None)


def test_a_shallow_copy_of_an_optimizer_repeats_no_draw():
    optimizer = dp2_rmsprop()
    again = copy.copy(optimizer)
    one_counter = again._noise_source is optimizer._noise_source
    assert one_counter or not set(key_of(again)) & set(key_of(optimizer))
