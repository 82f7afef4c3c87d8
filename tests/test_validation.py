"""What cannot be trained privately is refused, by name, before anything changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import logistic_model
from refusals import X, Y, model_of, optimizer, refuses_to_compile, refuses_to_fit

import dp2_keras as dp2
from dp2_keras import _keras

# Arguments of the optimizers.

GOOD = dict(learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=1.0, delay=2)


@pytest.mark.parametrize(
    "bad",
    [
        dict(l2_norm_clip=-1.0), dict(l2_norm_clip=0.0), dict(l2_norm_clip=np.nan), dict(l2_norm_clip=np.inf),
        dict(sgd_l2_norm_clip=-1.0), dict(sgd_l2_norm_clip=np.nan), dict(sgd_l2_norm_clip=np.inf),
        dict(noise_multiplier=-0.1), dict(noise_multiplier=np.inf), dict(noise_multiplier=np.nan),
        dict(learning_rate=-0.1), dict(learning_rate=np.inf), dict(learning_rate=np.nan),
        dict(sgd_learning_rate=-0.1), dict(sgd_learning_rate=np.nan),
        dict(delay=0), dict(delay=1.5), dict(delay=-3), dict(delay=True), dict(delay=None),
        dict(sgd_steps=2), dict(delay=None, sgd_steps=2), dict(delay=None, sgd_steps=2, adaptive_steps=0),
        dict(rho=1.0), dict(rho=-0.1), dict(eps=0.0), dict(eps=-1e-7), dict(eps=np.nan),
        dict(bias_correction="yes"), dict(expected_batch_size=0), dict(expected_batch_size=2.5),
        dict(noise_seed=1.5),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_out_of_range_is_named_with_what_was_received(bad):
    with pytest.raises(ValueError, match=f"`{list(bad)[-1]}`.*must be .*Received: "):
        dp2.DP2RMSprop(**{**GOOD, **bad})


@pytest.mark.parametrize("bad", [dict(beta_1=1.0), dict(beta_2=-0.5), dict(eps=0.0)], ids=str)
def test_dpadam_checks_its_own(bad):
    with pytest.raises(ValueError, match=f"`{list(bad)[0]}` must be .* Received: "):
        dp2.DPAdam(0.1, 1.0, 1.0, **bad)


@pytest.mark.parametrize(
    "name", ["gradient_accumulation_steps", "loss_scale_factor", "clipnorm", "clipvalue", "global_clipnorm"]
)
def test_what_would_change_the_clip_is_refused_with_the_replacement(name):
    with pytest.raises(ValueError, match=f"`{name}` .*use .*Received: {name}=2"):
        optimizer(**{name: 2})


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="has no argument `momentun`"):
        optimizer(momentun=0.9)


# Layers and policies.


@pytest.mark.parametrize(
    "layer",
    [keras.layers.BatchNormalization, *([keras.layers.MixUp] if hasattr(keras.layers, "MixUp") else [])],
)
def test_layers_that_mix_examples_are_refused_at_compile(layer):
    layer = layer(name="mixer")
    refuses_to_compile(dp2.DP2Sequential([layer, keras.layers.Dense(1)]), "'mixer'.*mixes the examples")


def test_nested_layers_are_found():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(name="deep")])
    refuses_to_compile(model_of(inner), "'deep'")


def test_frozen_batch_normalization_is_data_free():
    layer = keras.layers.BatchNormalization()
    layer.trainable = False
    model = model_of(layer)
    model.compile(optimizer=optimizer(), loss="mse")
    before = [w.numpy() for w in layer.weights]
    model.fit(X, Y, batch_size=4, verbose=0)
    for old, new in zip(before, layer.weights):
        np.testing.assert_array_equal(old, new.numpy())


def test_a_layer_may_be_declared_to_treat_examples_apart():
    @dp2.declare_per_example
    class Running(keras.layers.BatchNormalization):
        def call(self, inputs, training=None):
            return super().call(inputs, training=False)

    model = model_of(Running())
    model.compile(optimizer=optimizer(), loss="mse")
    model.fit(X, Y, batch_size=4, verbose=0)


def test_a_subclass_does_not_inherit_the_declaration():
    @dp2.declare_per_example
    class Running(keras.layers.BatchNormalization):
        pass

    class Other(Running):
        pass

    refuses_to_compile(model_of(Other()), "mixes the examples")


def test_float16_is_refused():
    model = model_of(keras.layers.Dense(2, dtype="mixed_float16", name="half"))
    refuses_to_compile(model, "'half' computes in float16.*mixed_bfloat16")


def test_a_loss_scale_optimizer_is_refused():
    if _keras.KERAS_3:
        wrapped = keras.optimizers.LossScaleOptimizer(optimizer())
    else:
        wrapped = keras.mixed_precision.LossScaleOptimizer(optimizer())
    refuses_to_compile(model_of(), "LossScaleOptimizer.*mixed_bfloat16", optimizer=wrapped)


@pytest.mark.parametrize("plain", ["rmsprop", keras.optimizers.SGD])
def test_a_plain_optimizer_is_refused(plain):
    plain = plain if isinstance(plain, str) else plain()
    refuses_to_compile(model_of(), "must be one of dp2_keras's optimizers", optimizer=plain)


def test_activity_regularisers_and_added_losses_are_refused():
    model = model_of(keras.layers.Dense(2, activity_regularizer="l2", name="active"))
    refuses_to_compile(model, "'active' has an `activity_regularizer`")

    class Adds(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(tf.reduce_mean(inputs))
            return inputs

    refuses_to_fit(model_of(Adds(name="adds")), "'adds' calls `add_loss`")


# Losses, labels and inputs.


@pytest.mark.skipif(not _keras.KERAS_3, reason="the reduction is new in Keras 3")
def test_a_mean_over_sample_weights_is_refused():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    refuses_to_compile(model_of(), "sum_over_batch_size", loss=loss)


def test_labels_of_the_wrong_shape_are_refused():
    model = dp2.DP2Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="softmax")])
    refuses_to_fit(model, "hape", loss="categorical_crossentropy", y=np.ones((8, 3), np.float32))


def test_labels_and_tokens_out_of_range_are_refused():
    classes = dp2.DP2Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="softmax")])
    for wrong in (4, -1):
        refuses_to_fit(
            classes, "labels must be at least 0 and below 4", loss="sparse_categorical_crossentropy",
            y=np.array([0, 1, 2, 3, 0, 1, 2, wrong]),
        )  # fmt: skip
    tokens = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(5, 2, name="words"),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    refuses_to_fit(dp2.make_private(tokens), "'words' must be at least 0 and below 5", x=np.full((8, 2), 5))


@pytest.mark.skipif(_keras.KERAS_3, reason="Keras 3 models take no ragged tensors at all")
def test_ragged_inputs_are_refused():
    data = tf.data.Dataset.from_tensor_slices((tf.RaggedTensor.from_tensor(tf.constant(X)), Y)).batch(4)
    refuses_to_fit(model_of(), "", (ValueError, TypeError), x=data, y=None, batch_size=None, dataset_size=8)


def test_no_trainable_weights():
    model = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])
    model.compile(optimizer=optimizer(), loss="mse")
    with pytest.raises(ValueError, match="must have a trainable weight"):
        model.fit(X[:, :1], Y, batch_size=4, verbose=0)


# Models and callbacks.


def own_train_step(base):
    return type("Own", (base,), {"train_step": lambda self, data: {}})


def test_a_train_step_of_one_s_own_is_refused():
    with pytest.raises(ValueError, match="Own must not have a `train_step` of its own.*compute_loss"):
        dp2.make_private(own_train_step(keras.Sequential)([keras.layers.Dense(1)]))
    refuses_to_compile(own_train_step(dp2.DP2Sequential)([keras.layers.Dense(1)]), "`train_step` of its own")


@pytest.mark.parametrize(
    "callback, refused",
    [
        (lambda: keras.callbacks.EarlyStopping(monitor="loss"), True),
        (lambda: keras.callbacks.EarlyStopping(monitor="val_loss"), False),
        (lambda: keras.callbacks.ReduceLROnPlateau(monitor="accuracy"), True),
        (lambda: keras.callbacks.ModelCheckpoint("m.keras", monitor="loss", save_best_only=True), True),
        (lambda: keras.callbacks.ModelCheckpoint("m.keras", monitor="loss"), False),
        (lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2), False),
    ],
)
def test_callbacks_steered_by_training_metrics_are_refused(callback, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = logistic_model(3, optimizer())
    arguments = dict(batch_size=4, validation_data=(X, Y), callbacks=[callback()])
    if refused:
        refuses_to_fit(model, "must not steer training.*val_", **arguments)
    else:
        model.fit(X, Y, verbose=0, **arguments)


def test_compile_checks_its_own_arguments():
    refuses_to_compile(model_of(), "`physical_batch_size` must be a positive integer", physical_batch_size=0)
    refuses_to_compile(model_of(), "`method` must be one of", method="fastest")
    refuses_to_compile(model_of(), "`diagnostics` must be True or False", diagnostics=1)


def test_a_replica_must_not_take_a_step_by_itself():
    model = logistic_model(3, optimizer())
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(ValueError, match="would not add up to the stated deviation.*Received: 2"):
        with tf.distribute.ReplicaContext(strategy, 0):
            model.optimizer.begin_step(model.trainable_variables)


def test_importing_does_not_import_tf_privacy_or_tff():
    import subprocess
    import sys

    code = (
        "import sys, dp2_keras; "
        "assert not {m.split('.')[0] for m in sys.modules} & {'tensorflow_privacy', 'tensorflow_federated'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_loss_that_raises_once_leaves_a_model_that_trains():
    class Moody(keras.losses.Loss):
        raises = True

        def call(self, y_true, y_pred):
            if Moody.raises:
                raise ValueError("not today")
            return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)

    model = model_of()
    model.compile(optimizer=optimizer(), loss=Moody())
    for _ in range(2):
        with pytest.raises(ValueError, match="not today"):
            model.train_on_batch(X, Y)
    Moody.raises = False
    model.train_on_batch(X, Y)
    assert int(model.optimizer.iterations) == 1


def test_complex_weights_are_refused():
    class Phase(keras.layers.Layer):
        def build(self, input_shape):
            self.phase = tf.Variable(tf.ones([1], tf.complex64), trainable=True)
            super().build(input_shape)

        def call(self, inputs):
            return inputs * tf.math.real(self.phase)

    model = dp2.DPSGD(0.1, 1.0, 1.0, expected_batch_size=1)
    layer = Phase()
    layer(tf.ones([1, 1]))
    with pytest.raises(ValueError, match="must be real numbers"):
        model.begin_step([layer.phase])


@pytest.mark.parametrize(
    "callbacks",
    [
        lambda: [keras.callbacks.TerminateOnNaN()],
        lambda: keras.callbacks.CallbackList([keras.callbacks.EarlyStopping(monitor="loss")]),
    ],
)
def test_callbacks_in_disguise_are_refused(callbacks):
    refuses_to_fit(logistic_model(3, optimizer()), "must not steer training", callbacks=callbacks())


def test_data_given_by_name_is_checked_by_name():
    first, second = keras.Input((1,), name="b", dtype="int32"), keras.Input((1,), name="a", dtype="int32")
    embedded = [keras.layers.Embedding(100, 2)(first), keras.layers.Embedding(5, 2)(second)]
    output = keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Concatenate()(embedded)))
    model = dp2.DP2Model([first, second], output)
    model.compile(optimizer=optimizer(), loss="mse")
    large, small = np.full((8, 1), 99), np.full((8, 1), 4)
    model.fit({"a": small, "b": large}, Y, batch_size=4, verbose=0)
    refuses_to_fit(model, "below 5", x={"a": large, "b": large})


def test_inputs_and_labels_of_different_lengths_are_refused():
    model = logistic_model(3, optimizer())
    with pytest.raises(ValueError):
        model.train_on_batch(X[:4], Y[:1])
    assert int(model.optimizer.iterations) == 0


# A step that did not happen does not count.


def test_only_steps_that_ran_are_counted():
    model = logistic_model(3, dp2.DP2Adagrad(0.1, 1.0, 0.0, delay=3, expected_batch_size=4))
    unknown = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).filter(lambda x, y: True)
    for fits in (1, 2, 3):
        model.fit(unknown, dataset_size=8, verbose=0)
        assert int(model.optimizer.iterations) == 2 * fits
    assert np.all(model.optimizer._second_moments[0].numpy() > 0)


def test_a_step_that_fails_at_run_time_does_not_count():
    model = logistic_model(3, optimizer())

    def stream():
        yield X[:4], Y[:4]
        raise ValueError("no more")

    spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))
    data = tf.data.Dataset.from_generator(stream, output_signature=spec)
    with pytest.raises(Exception, match="no more"):
        model.fit(data, dataset_size=8, verbose=0, epochs=3)
    assert int(model.optimizer.iterations) == 1
