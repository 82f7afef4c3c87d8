"""Copies, clones, and `unwrap`, which gives back a plain model that knows nothing of this package."""

import copy
import io
import pickle
import zipfile

import keras
import numpy as np
import pytest
from conftest import flat_weights
from saved import (
    FEATURES,
    KERAS_3,
    MODELS,
    PrivateNetwork,
    assert_resumes,
    assert_same,
    batch,
    compiled,
    each_class,
    each_optimizer,
    functional,
    layers,
    optimizer_of,
    run_python,
    state,
    train,
)

import dp2_keras as dp2
from dp2_keras.training import PrivateTraining

# Copies.


@each_class
def test_a_copied_model_resumes(kind):
    model = compiled(kind)
    train(model, 0, 4)
    unpickled = pickle.loads(pickle.dumps(model))
    assert_same(state(model), state(unpickled))
    again = copy.deepcopy(model)
    assert type(again) is type(unpickled) is type(model)
    assert_resumes(model, again, 4)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 cannot copy an optimizer, its own neither")
@each_optimizer
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copied_optimizer_has_the_same_config(name, copied):
    optimizer = optimizer_of(name)
    again = copied(optimizer)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    assert again.ticket != optimizer.ticket  # Its steps do not count as the other's.


def update_of(model, **arguments):
    """How far ten examples, each with a gradient of a thousand or so, move the weights."""
    before = flat_weights(model)
    model.fit(1e3 * np.ones([10, FEATURES]), -1e3 * np.ones([10, 1]), batch_size=10, verbose=0, **arguments)
    return np.linalg.norm(flat_weights(model) - before)


def clipping(**arguments):
    return dp2.DPSGD(learning_rate=1.0, l2_norm_clip=0.5, noise_multiplier=0.0, **arguments)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if "sequential" not in kind])
def test_a_clone_is_private(kind):
    model = compiled(kind, clipping(), physical_batch_size=3)
    clone = keras.models.clone_model(model)
    assert isinstance(clone, PrivateTraining)
    clone.compile(optimizer=clipping(), loss="mse")
    clone(batch(0)[0])
    assert 0 < update_of(clone) <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("kind", ["sequential", "sequential without input"])
def test_a_sequential_clone_is_plain_and_refuses_to_train_on_a_mean(kind):
    # `clone_model` gives `keras.Sequential` for whatever inherits from it.
    model = compiled(kind, clipping(), physical_batch_size=3, method="loop", diagnostics=False)
    clone = keras.models.clone_model(model)
    assert type(clone) is keras.Sequential
    if not KERAS_3:  # Keras 3 compiles the clone like the model.
        clone.compile(optimizer=clipping(), loss="mse")
    clone(batch(0)[0])
    before = flat_weights(clone)
    for _ in range(2):
        with pytest.raises(dp2.NonPrivateUpdateError, match="make_private"):
            update_of(clone)
    np.testing.assert_array_equal(flat_weights(clone), before)


def test_a_sequential_clone_trains_privately_on_unreduced_losses():
    clone = keras.models.clone_model(compiled())
    clone.compile(
        optimizer=clipping(expected_batch_size=10),
        loss=keras.losses.MeanSquaredError(reduction="none"),
        jit_compile=False,
    )
    assert 0 < update_of(clone) <= 0.5 * (1 + 1e-5)


def test_a_sequential_clone_can_be_made_private():
    clone = dp2.make_private(keras.models.clone_model(compiled()))
    clone.compile(optimizer=clipping(), loss="mse")
    assert 0 < update_of(clone) <= 0.5 * (1 + 1e-5)


# `unwrap`: back to plain Keras, for serving.


def files_of(path):
    """The bytes of a file, or of all files in a folder, and of what they pack."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        data = file.read_bytes()
        yield file.name.encode()
        yield data
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                yield from (archive.read(name) for name in archive.namelist())


def assert_no_trace(path):
    assert not [data for data in files_of(path) if b"dp2" in data.lower()]


@pytest.mark.parametrize("kind", ["sequential", "functional", "wrapper"])
def test_unwrap_gives_a_plain_model_that_shares_the_weights(kind):
    model = compiled(kind)
    train(model, 0, 2)
    plain = dp2.unwrap(model)
    assert not isinstance(plain, PrivateTraining)
    assert type(plain).__module__.split(".")[0] in ("keras", "saved")
    assert plain.name == "net"
    assert [id(v) for v in plain.weights] == [id(v) for v in model.weights]
    train(model, 2, 4)  # Still trains, and the plain model follows.
    np.testing.assert_array_equal(
        plain.predict(batch(9)[0], verbose=0), model.predict(batch(9)[0], verbose=0)
    )


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "subclass"])
def test_an_unwrapped_models_file_has_no_trace_of_this_package(tmp_path, kind):
    model = compiled(kind)
    plain = dp2.unwrap(model)
    plain.save(tmp_path / "plain.keras")
    assert_no_trace(tmp_path / "plain.keras")
    loaded = keras.models.load_model(tmp_path / "plain.keras")
    assert type(loaded) is type(plain)
    np.testing.assert_array_equal(
        loaded.predict(batch(9)[0], verbose=0), model.predict(batch(9)[0], verbose=0)
    )


@pytest.mark.parametrize("kind", ["sequential", "functional", "wrapper"])
def test_an_unwrapped_models_other_files_have_no_trace_either(tmp_path, kind):
    plain = dp2.unwrap(compiled(kind))
    plain.save_weights(tmp_path / "plain.weights.h5")
    plain.export(str(tmp_path / "exported"))
    assert_no_trace(tmp_path)


def test_a_private_models_file_has_a_trace(tmp_path):
    compiled().save(tmp_path / "private.keras")
    with pytest.raises(AssertionError):
        assert_no_trace(tmp_path / "private.keras")


@pytest.mark.parametrize(
    "make", [lambda: dp2.DP2Sequential([keras.Input((3,)), *layers()]), lambda: dp2.DP2Model(*functional())]
)
def test_a_name_that_keras_made_up_leaves_no_trace(tmp_path, make):
    for number in range(2):  # The second has a number in its name.
        dp2.unwrap(make()).save(tmp_path / f"{number}.keras")
    assert_no_trace(tmp_path)


def test_an_unwrapped_model_serves_where_this_package_is_not_installed(tmp_path):
    kinds = ["sequential", "functional"]
    for kind in kinds:
        model = compiled(kind)
        dp2.unwrap(model).save(tmp_path / f"{kind}.keras")
        np.savez(tmp_path / f"{kind}.npz", x=batch(9)[0], y=model.predict(batch(9)[0], verbose=0))
    run_python(
        """
        import sys
        sys.modules["dp2_keras"] = None
        import keras, numpy as np
        for kind in {kinds}:
            data = np.load(rf"{path}/{{kind}}.npz")
            model = keras.models.load_model(rf"{path}/{{kind}}.keras")
            np.testing.assert_array_equal(model.predict(data["x"], verbose=0), data["y"])
        """,
        path=tmp_path,
        kinds=kinds,
    )


def test_unwrap_of_a_plain_model_is_that_model():
    plain = keras.Sequential([keras.Input((FEATURES,)), *layers()])
    assert dp2.unwrap(plain) is plain


def test_a_model_that_is_private_by_itself_cannot_be_unwrapped():
    with pytest.raises(ValueError, match=r"'net' \(PrivateNetwork\) is private by itself"):
        dp2.unwrap(PrivateNetwork(name="net"))
    inner = dp2.DP2Sequential([keras.Input((FEATURES,)), *layers()], name="inner")
    outer = dp2.DP2Sequential([keras.Input((FEATURES,)), inner], name="outer")
    with pytest.raises(ValueError, match=r"'inner' \(DP2Sequential\) is private by itself"):
        dp2.unwrap(outer)
