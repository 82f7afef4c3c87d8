"""A clip norm by the loss: C = 4 for squared errors, 0.3 for every other loss."""

import keras
import numpy as np
import pytest

import dp2_keras as dp2
from dp2_keras import pilot
from dp2_keras.optimizers.auto_clip import clip_norm

X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")


def compiled(loss, **arguments):
    model = dp2.DP2Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(dp2.DP2NoiseFloor(noise_multiplier=1.0, noise_seed=3, **arguments), loss=loss)
    return model


def trained(loss, **arguments):
    model = compiled(loss, **arguments)
    model.fit(X, Y, batch_size=10, epochs=2, verbose=0)
    return model.get_weights()


def half_squared_error(y_true, y_pred):
    return 0.5 * (y_true - y_pred) ** 2


BINARY = keras.losses.BinaryCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    "loss, clip",
    [
        ("mse", 4.0),
        ("mean_squared_error", 4.0),
        (keras.losses.mean_squared_error, 4.0),
        (keras.losses.MeanSquaredError(), 4.0),
        (keras.losses.MeanSquaredError(name="rating"), 4.0),
        (["binary_crossentropy", "mse"], 4.0),
        ({"kind": BINARY, "rating": ["mse", None]}, 4.0),
        ("binary_crossentropy", 0.3),
        (BINARY, 0.3),
        ("mae", 0.3),
        (half_squared_error, 0.3),
        (None, 0.3),
    ],
)
def test_a_loss_says_the_clip_norm(loss, clip):
    assert clip_norm(loss) == clip


@pytest.mark.parametrize("loss, clip", [("mse", 4.0), (BINARY, 0.3)])
def test_training_is_that_of_the_number(loss, clip):
    for found, expected in zip(trained(loss), trained(loss, l2_norm_clip=clip)):
        np.testing.assert_array_equal(found, expected)
        assert np.any(found)


@pytest.mark.parametrize("loss, clip", [("mse", 4.0), (BINARY, 0.3)])
def test_the_query_and_the_ledger_have_it(loss, clip):
    model = compiled(loss)
    model.optimizer.resolve_batch_size(10)
    model.optimizer.settle_rate(1)
    query = model.optimizer.begin_step(model.trainable_variables)
    assert float(query.sensitivity) == pytest.approx(clip)
    assert model.optimizer.mechanism().l2_norm_clips == (clip, pilot.squares_clip(clip))


def test_a_number_stays_what_it_is():
    assert compiled("mse", l2_norm_clip=0.7).optimizer.l2_norm_clip == 0.7


def test_a_subclassed_model_says_its_loss_too():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    model = dp2.make_private(Net())
    model.compile(dp2.DP2NoiseFloor(noise_multiplier=1.0), loss="mse")
    assert model.optimizer.l2_norm_clip == 4.0


def test_it_is_still_auto_in_the_config_and_settled_anew_from_a_file(tmp_path):
    model = compiled("mse")
    assert model.optimizer.get_config()["l2_norm_clip"] == "auto"
    copy = dp2.DP2NoiseFloor.from_config(model.optimizer.get_config())
    assert copy.l2_norm_clip == 0.3  # It knows no loss yet.
    model.fit(X, Y, batch_size=10, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert (again.optimizer.l2_norm_clip, again.optimizer.get_config()["l2_norm_clip"]) == (4.0, "auto")


def test_another_loss_needs_another_optimizer():
    model = compiled("mse")
    model.compile(model.optimizer, loss=keras.losses.MeanSquaredError())
    with pytest.raises(ValueError, match="is settled by the first loss.*asks for 0.3, after 4.0"):
        model.compile(model.optimizer, loss=BINARY)
    assert model.optimizer.l2_norm_clip == 4.0
    given = compiled("mse", l2_norm_clip=1.0)
    given.compile(given.optimizer, loss=BINARY)


def test_nobody_else_changes_it():
    with pytest.raises(AttributeError, match="`l2_norm_clip` is fixed"):
        compiled("mse").optimizer.l2_norm_clip = 1.0


@pytest.mark.parametrize("clip", ["none", None, 0.0, -1.0])
def test_other_words_are_refused(clip):
    with pytest.raises(ValueError, match="`l2_norm_clip` must be"):
        dp2.DP2NoiseFloor(l2_norm_clip=clip)
