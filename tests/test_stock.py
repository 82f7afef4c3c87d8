"""Plain Keras models compiled with a private optimizer: private, or refused, at every step."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
from conftest import fit_in_order, flat_weights

import dp2_keras as dp2
from dp2_keras import _keras, operations

N, FEATURES = 12, 5


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, FEATURES)).astype(np.float32), (rng.random((N, 1)) < 0.5).astype(np.float32)


def optimizer(**arguments):
    defaults = dict(learning_rate=0.05, l2_norm_clip=1.5, noise_multiplier=0.0, expected_batch_size=4)
    return dp2.DP2RMSprop(**{**defaults, **arguments}, delay=2, eps=1e-3)


def stock_model(*layers, loss=None, optimizer=optimizer, **compile_arguments):
    layers = layers or [keras.layers.Dense(1, kernel_initializer="zeros")]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    loss = loss or keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer=optimizer(), loss=loss, **{"jit_compile": False, **compile_arguments})
    return model


def fit(model, data, **arguments):
    return fit_in_order(model, *data, **{"batch_size": 4, "epochs": 2, **arguments})


def expected_path(data):
    x, y = data
    rows = [np.arange(t, t + 4) % N for t in range(0, 2 * N, 4)]
    return oracle.dp2(
        oracle.logistic_gradients(x, y[:, 0]), np.zeros(FEATURES + 1), rows, rule="rmsprop", s1=2, s2=2,
        lr=0.05, lr_sgd=0.05, clip_norm=1.5, clip_sgd=1.5, eps=1e-3, batch_size=4,
    )  # fmt: skip


def test_an_unreduced_loss_trains_privately(data):
    model = stock_model()
    fit(model, data)
    np.testing.assert_allclose(flat_weights(model), expected_path(data)[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(_keras.KERAS_3, reason="Keras 3 gives its optimizer no tape, so eager steps are refused")
def test_an_unreduced_loss_trains_privately_when_run_eagerly(data):
    model = stock_model(run_eagerly=True)
    fit(model, data)
    np.testing.assert_allclose(flat_weights(model), expected_path(data)[-1], rtol=1e-5, atol=1e-6)


def test_a_deeper_model_equals_its_private_twin(data):
    def layers():
        keras.utils.set_random_seed(1)
        return [
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(1),
        ]

    stock = stock_model(*layers(), optimizer=lambda: optimizer(noise_multiplier=1.0, noise_seed=3))
    twin = dp2.DP2Sequential([keras.Input((FEATURES,)), *layers()])
    twin.compile(
        optimizer=optimizer(noise_multiplier=1.0, noise_seed=3),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    for model in (stock, twin):
        fit(model, data)
    np.testing.assert_allclose(flat_weights(stock), flat_weights(twin), rtol=1e-4, atol=1e-5)


def refused(model, data, error=dp2.NonPrivateUpdateError, match="make_private", **arguments):
    """Training raises, every time, and changes nothing."""
    before = flat_weights(model)
    for _ in range(2):
        with pytest.raises(error, match=match):
            fit(model, data, **arguments)
    np.testing.assert_array_equal(flat_weights(model), before)


def test_a_reduced_loss_is_refused(data):
    refused(stock_model(loss="binary_crossentropy"), data)


def test_xla_is_refused(data):
    refused(stock_model(jit_compile=True), data, match="jit_compile=False")


@pytest.mark.skipif(not _keras.KERAS_3, reason="Keras 2 hands over the tape, which works eagerly")
def test_eager_mode_is_refused_where_there_is_no_tape(data):
    refused(stock_model(run_eagerly=True), data, match="run_eagerly=False")


def test_a_vector_of_another_length_is_refused(data):
    def short(y_true, y_pred):
        return tf.reduce_mean(tf.square(y_true - y_pred), axis=0)  # Over the batch, not the features.

    loss_class = type("Short", (keras.losses.Loss,), {"call": lambda self, a, b: short(a, b)})
    loss = dp2.declare_per_example(loss_class)(reduction="none")
    refused(
        stock_model(loss=loss),
        data,
        (dp2.NonPrivateUpdateError, tf.errors.InvalidArgumentError),
        "one number per example",
    )


def test_an_unknown_batch_size_is_refused(data):
    model = stock_model(optimizer=lambda: optimizer(expected_batch_size=None))
    refused(model, data, ValueError, "`expected_batch_size` must be given")


def test_layers_that_mix_examples_are_refused(data):
    refused(
        stock_model(keras.layers.BatchNormalization(), keras.layers.Dense(1)),
        data,
        ValueError,
        "mixes the examples",
    )

    class Centred(keras.layers.Layer):
        def call(self, inputs):
            return inputs - tf.reduce_mean(inputs, axis=0, keepdims=True)

    refused(
        stock_model(Centred(), keras.layers.Dense(1)), data, ValueError, "not known to treat the examples"
    )
    refused(stock_model(keras.layers.Softmax(axis=0), keras.layers.Dense(1)), data, ValueError, "not known")
    refused(
        stock_model(keras.layers.Dense(1, activation=lambda t: t - tf.reduce_mean(t))),
        data,
        ValueError,
        "not known",
    )


def test_operations_between_layers_are_checked_too(data):
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(3)(inputs)
    mean = (
        keras.ops.mean(hidden, axis=0, keepdims=True)
        if _keras.KERAS_3
        else tf.reduce_mean(hidden, 0, keepdims=True)
    )
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden - mean))
    model.compile(optimizer(), keras.losses.MeanSquaredError(reduction="none"), jit_compile=False)
    refused(model, data, ValueError, "not known to treat the examples")


def test_a_subclassed_model_is_refused_unless_declared(data):
    class Linear(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="zeros")

        def call(self, inputs):
            return self.dense(inputs)

    loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
    model = Linear()
    model(data[0])
    model.compile(optimizer(), loss, jit_compile=False)
    refused(model, data, ValueError, "subclassed model")
    dp2.declare_per_example(Linear)
    model.compile(optimizer(), loss, jit_compile=False)
    fit(model, data)
    np.testing.assert_allclose(flat_weights(model), expected_path(data)[-1], rtol=1e-5, atol=1e-6)


def test_weight_regularisers_are_refused_by_keras_itself(data):
    refused(stock_model(keras.layers.Dense(1, kernel_regularizer="l2")), data, ValueError, "equal rank")


def test_raw_gradients_are_refused_on_the_first_call_and_on_the_hundredth(data):
    model = stock_model()
    variables = model.trainable_variables
    gradients = [tf.ones(v.shape) for v in variables]

    def all_ways_raise():
        before = flat_weights(model)
        ways = [
            lambda: model.optimizer.apply_gradients(zip(gradients, variables)),
            lambda: tf.function(lambda: model.optimizer.apply_gradients(zip(gradients, variables)))(),
            lambda: model.optimizer.update_step(gradients[0], _keras.native(variables[0]), 0.1),
        ]
        if hasattr(model.optimizer, "apply"):
            ways.append(lambda: model.optimizer.apply(gradients, variables))
        if hasattr(model.optimizer, "minimize"):
            ways.append(
                lambda: model.optimizer.minimize(
                    lambda: tf.add_n([tf.reduce_sum(v) for v in variables]), variables
                )
            )
            ways.append(lambda: model.optimizer.compute_gradients(lambda: 0.0, variables))
        for way in ways:
            with pytest.raises(dp2.NonPrivateUpdateError):
                way()
        np.testing.assert_array_equal(flat_weights(model), before)

    all_ways_raise()
    for _ in range(100):
        with pytest.raises(dp2.NonPrivateUpdateError):
            model.optimizer.apply_gradients(zip(gradients, variables))
    fit(model, data)
    all_ways_raise()


def test_a_train_step_of_one_s_own_is_refused(data):
    class Own(keras.Sequential):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"loss": loss}

    model = Own([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(optimizer(), keras.losses.MeanSquaredError(reduction="none"), jit_compile=False)
    refused(model, data)


def test_a_loss_kept_from_another_step_is_not_used(data):
    """A vector handed to `scale_loss` outside Keras's `train_step` opens nothing."""
    model = stock_model()
    if _keras.KERAS_3:
        model.optimizer.scale_loss(tf.ones([4]))
    with pytest.raises(dp2.NonPrivateUpdateError):
        model.optimizer.apply_gradients([(tf.ones(v.shape), v) for v in model.trainable_variables])


class BatchMean(keras.losses.Loss):
    """A vector whose entries all depend on all examples."""

    def call(self, y_true, y_pred):
        return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1) * 0 + tf.reduce_mean(y_pred)


@pytest.mark.parametrize(
    "loss",
    [
        lambda: BatchMean(reduction="none"),
        lambda: keras.losses.CosineSimilarity(axis=0, reduction="none"),
        *([lambda: keras.losses.Circle(reduction="none")] if _keras.KERAS_3 else []),
    ],
)
def test_a_loss_whose_entries_mix_examples_is_refused(data, loss):
    refused(stock_model(loss=loss()), data, ValueError, "treats the examples apart")


def test_one_reduced_loss_of_two_is_refused(data):
    x, y = data
    inputs = keras.Input((FEATURES,))
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
    losses = [keras.losses.MeanSquaredError(reduction="none"), keras.losses.MeanSquaredError()]
    model.compile(optimizer(), losses, jit_compile=False)
    # Keras 2 cannot add a vector and a number; Keras 3 broadcasts, and every entry sees every example.
    with pytest.raises(ValueError, match="treats the examples apart" if _keras.KERAS_3 else "equal rank"):
        fit(model, (x, [y, y]))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.Softmax(axis=-2),
        lambda: keras.layers.UnitNormalization(axis=0),
        lambda: keras.layers.Dense(1, activation=keras.layers.Softmax(axis=0)),
        lambda: keras.layers.Dense(1, activation=keras.layers.Lambda(lambda t: t - tf.reduce_mean(t, 0))),
        lambda: keras.layers.Activation(lambda t: t - tf.reduce_mean(t, 0)),
        lambda: keras.layers.EinsumDense("ab,ac->cb", output_shape=(1,)),
        lambda: keras.layers.Reshape(()),
    ],
)
def test_arguments_that_reach_the_batch_axis_are_refused(layer):
    inputs = keras.Input((1,), batch_size=4)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Reshape((1,))(layer()(inputs))))
    with pytest.raises(ValueError, match="not known to treat the examples"):
        operations.check(model)


def test_an_input_of_one_axis_is_refused():
    inputs = keras.Input(())
    model = keras.Model(inputs, keras.layers.Reshape((1,))(inputs))
    with pytest.raises(ValueError, match="one axis"):
        operations.check(model)


def test_an_empty_batch_is_a_step_of_pure_noise(data):
    empty = tf.data.Dataset.from_tensors((data[0][:0], data[1][:0]))
    quiet = stock_model()
    quiet.fit(empty, verbose=0)
    np.testing.assert_array_equal(flat_weights(quiet), np.zeros(FEATURES + 1))
    noisy = stock_model(optimizer=lambda: optimizer(noise_multiplier=1.0))
    noisy.fit(empty, verbose=0)
    assert np.all(flat_weights(noisy) != 0)
