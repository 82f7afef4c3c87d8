"""A clip norm by the loss: C = 4 / sqrt(k) for mean squared errors of k outputs, 0.3 for every other loss."""

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


MSE = keras.losses.MeanSquaredError


@pytest.mark.parametrize(
    "loss, clip",
    [
        *[(loss, 4.0) for loss in ("mse", "mean_squared_error", "MSE", keras.losses.mean_squared_error)],
        *[(loss, 4.0) for loss in (MSE, MSE(), MSE(name="rating"))],
        *[(loss, 0.3) for loss in ("binary_crossentropy", BINARY, "mae", half_squared_error, None)],
    ],
)
def test_a_loss_says_the_clip_norm(loss, clip):
    assert clip_norm([loss], [(None, 1)]) == clip


@pytest.mark.parametrize(
    "losses, shapes, clip",
    [
        (["mse"], [(None, 4)], 2.0),
        (["mse"], [(None, 5, 5, 4)], 0.4),
        (["mse"], [(None, 4), (None, 16)], 2.0),
        (["mse", BINARY], [(None, 16), (None, 1)], 1.0),
        ([BINARY, "mse"], [(None, 1), (None, 10_000)], 0.3),
        ([BINARY], None, 0.3),
    ],
)
def test_a_mean_of_many_outputs_has_short_gradients(losses, shapes, clip):
    assert clip_norm(losses, shapes) == pytest.approx(clip)


@pytest.mark.parametrize("shapes", [None, [(None, None, 3)]])
def test_how_many_outputs_there_are_must_be_known(shapes):
    with pytest.raises(ValueError, match="needs to know how many outputs.*Received: outputs of shape"):
        clip_norm(["mse"], shapes)


def test_losses_by_name_go_with_their_outputs():
    x = keras.Input((3,))
    sizes = {"kind": 1, "rating": 4}
    model = dp2.DP2Model(x, {name: keras.layers.Dense(size, name=name)(x) for name, size in sizes.items()})
    model.compile(dp2.DP2NoiseFloor(noise_multiplier=1.0), loss={"rating": "mse", "kind": BINARY})
    assert model.optimizer.l2_norm_clip == 2.0


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


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


def test_a_subclassed_model_does_not_know_its_outputs():
    model = dp2.make_private(Net())
    with pytest.raises(ValueError, match="begin the model with an `Input`, or give `l2_norm_clip` a number"):
        model.compile(dp2.DP2NoiseFloor(noise_multiplier=1.0), loss="mse")
    model.compile(dp2.DP2NoiseFloor(noise_multiplier=1.0), loss=BINARY)
    assert model.optimizer.l2_norm_clip == 0.3


def test_it_is_still_auto_in_the_config_and_settled_anew_from_a_file(tmp_path):
    model = compiled("mse")
    assert model.optimizer.get_config()["l2_norm_clip"] == "auto"
    copy = dp2.DP2NoiseFloor.from_config(model.optimizer.get_config())
    assert copy.l2_norm_clip == 0.3  # It knows no loss yet.
    model.fit(X, Y, batch_size=10, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert (again.optimizer.l2_norm_clip, again.optimizer.get_config()["l2_norm_clip"]) == (4.0, "auto")


def test_another_loss_needs_another_optimizer_once_steps_were_taken():
    model = compiled("mse")
    with pytest.raises(TypeError):
        model.compile(model.optimizer, loss=BINARY, metricz=[])
    model.compile(model.optimizer, loss=BINARY)
    model.fit(X, Y, batch_size=10, verbose=0)
    model.compile(model.optimizer, loss="hinge")
    with pytest.raises(ValueError, match="is settled, because the steps so far.* asks for 4, after 0.3"):
        model.compile(model.optimizer, loss="mse")
    assert model.optimizer.l2_norm_clip == 0.3
    model.fit(X, Y, batch_size=10, verbose=0)


def test_models_that_share_an_optimizer_never_mix_two_clip_norms():
    model, other = compiled("mse"), compiled(BINARY)
    other.compile(model.optimizer, loss=BINARY)  # No step was taken yet.
    model.fit(X, Y, batch_size=10, epochs=2, verbose=0)
    for found, expected in zip(model.get_weights(), trained("mse", l2_norm_clip=0.3)):
        np.testing.assert_array_equal(found, expected)
    assert model.ledger.entries[-1].mechanism.l2_norm_clips == (0.3, pilot.squares_clip(0.3))
    with pytest.raises(ValueError, match="asks for 4, after 0.3"):
        other.compile(model.optimizer, loss="mse")


def plain_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def plain_clone():
    return keras.models.clone_model(dp2.unwrap(compiled("mse")))


@pytest.mark.parametrize("make", [plain_model, plain_clone])
def test_without_a_private_compile_no_step_is_taken(make):
    model, settled = make(), compiled("mse", learning_rate=0.1, expected_batch_size=10).optimizer
    optimizer = dp2.DP2NoiseFloor.from_config(settled.get_config())
    model.compile(optimizer, loss=MSE(reduction="none"), jit_compile=False)
    with pytest.raises(ValueError, match='`l2_norm_clip="auto"` is settled by `compile` of a private model'):
        model.fit(X, Y, batch_size=10, verbose=0)
    with pytest.raises(ValueError, match='`l2_norm_clip="auto"` is settled by'):
        optimizer.begin_step(model.trainable_variables)
    assert int(optimizer.iterations) == 0


def test_nobody_else_changes_it():
    with pytest.raises(AttributeError, match="`l2_norm_clip` is fixed"):
        compiled("mse").optimizer.l2_norm_clip = 1.0


@pytest.mark.parametrize("clip", ["none", "Auto", None, 0.0, -1.0])
def test_other_words_are_refused(clip):
    rule = 'a number, or "auto"' if isinstance(clip, str) else "a number of at least"
    with pytest.raises(ValueError, match=f"`l2_norm_clip` must be {rule}"):
        dp2.DP2NoiseFloor(l2_norm_clip=clip)
