"""A forward pass or a loss that keeps what it sees is found, by whatever means it does so."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from refusals import X, Y, model_of, optimizer, refuses_to_fit

import dp2_keras as dp2
from dp2_keras import _keras


class Counts(keras.layers.Layer):
    """Writes the mean of what it sees."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, inputs):
        self.seen.assign(tf.reduce_mean(inputs))
        return inputs


def test_state_written_from_data_is_found_by_tracing():
    layer = Counts(name="counts")
    refuses_to_fit(model_of(layer), "'counts' is written by the forward pass")
    assert layer.seen.numpy() == 0


def test_state_written_inside_a_branch_is_found():
    class Branch(Counts):
        def call(self, inputs):
            tf.cond(tf.reduce_sum(inputs) > 0, lambda: super(Branch, self).call(inputs), lambda: inputs)
            return inputs

    refuses_to_fit(model_of(Branch()), "written by the forward pass")


def test_stateful_recurrent_layers_are_refused():
    model = dp2.DP2Sequential(
        [keras.Input((2, 3), batch_size=4), keras.layers.LSTM(2, stateful=True), keras.layers.Dense(1)]
    )
    refuses_to_fit(model, "written by the forward pass", x=np.ones((8, 2, 3), np.float32))


class Bank(keras.layers.Layer):
    """Keeps what it sees by the means `how` names."""

    memory = []

    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.how = how
        self.bank = tf.Variable(tf.zeros([3]), trainable=False)
        self.queue = tf.queue.FIFOQueue(100, tf.float32)

    def call(self, inputs):
        if self.how == "slice":
            self.bank[0:1].assign(inputs[0, :1])
        elif self.how == "queue":
            self.queue.enqueue(inputs[0, 0])
        else:
            inputs = tf.ensure_shape(tf.numpy_function(self._remember, [inputs], tf.float32), inputs.shape)
        return inputs

    def _remember(self, array):
        Bank.memory.append(array)
        return array


@pytest.mark.parametrize("how", ["slice", "queue", "numpy"])
def test_every_way_to_keep_data_is_found(how):
    refuses_to_fit(model_of(Bank(how)), "written by the forward pass")


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_state_written_by_the_loss_is_found(run_eagerly):
    class Centre(dp2.DP2Sequential):
        def build(self, *args, **kwargs):
            super().build(*args, **kwargs)
            self.centre = tf.Variable(0.0, trainable=False)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
            self.centre.assign(tf.reduce_mean(x))
            return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **kwargs)

    model = Centre([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=optimizer(), loss="mse", run_eagerly=run_eagerly)
    model.build((None, 3))
    refuses_to_fit(model, "written by the forward pass or its loss")
    assert model.centre.numpy() == 0


def test_a_layer_changed_after_the_first_trace_is_checked_again():
    layer = keras.layers.BatchNormalization(center=False, scale=False)
    layer.trainable = False
    model = model_of(layer)
    model.compile(optimizer=optimizer(), loss="mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    layer.trainable = True
    model.train_function = None  # Traced again, as for another shape of batch.
    if _keras.KERAS_3:
        with pytest.raises(ValueError, match="mixes the examples"):
            model.fit(X, Y, batch_size=4, verbose=0)
    else:  # Keras 2 trains with what was trainable at `compile`.
        model.fit(X, Y, batch_size=4, verbose=0)
    np.testing.assert_array_equal(layer.moving_mean.numpy(), np.zeros(3))
