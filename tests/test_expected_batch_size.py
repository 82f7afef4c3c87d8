"""The sum of a step is divided by the batch size that is stated, or else by that of `fit`."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import fit_in_order, flat_weights, logistic_model
from refusals import X, Y, model_of, optimizer, refuses_to_fit

import dp2_keras as dp2


def test_an_unknown_batch_size():
    unknown = lambda: optimizer(expected_batch_size=None)  # noqa: E731
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    refuses_to_fit(
        model_of(),
        "`expected_batch_size` must be given",
        x=data,
        y=None,
        batch_size=None,
        optimizer=unknown,
        dataset_size=8,
    )
    model = model_of()
    model.compile(optimizer=unknown(), loss="mse")
    with pytest.raises(ValueError, match="`expected_batch_size` must be given"):
        model.train_on_batch(X, Y)


@pytest.mark.parametrize(
    "fit_arguments, expected",
    [(dict(x=X, y=Y, batch_size=2), 2), (dict(x=X, y=Y), 8)],  # Of 8 examples, 32 are all.
)
def test_the_batch_size_of_fit_is_the_divisor(fit_arguments, expected):
    model = logistic_model(3, optimizer(expected_batch_size=None))
    model.fit(**fit_arguments, verbose=0)
    assert model.optimizer._batch_size == expected
    static = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=True)
    model.fit(static, dataset_size=8, verbose=0)
    assert model.optimizer._batch_size == 4


def test_a_stated_batch_size_stands():
    model = logistic_model(3, optimizer(expected_batch_size=7))
    model.fit(X, Y, batch_size=2, verbose=0)
    assert model.optimizer._batch_size == 7


def test_another_batch_size_in_a_second_fit_changes_the_divisor():
    model = logistic_model(3, dp2.DPSGD(1.0, np.inf, 0.0))
    for batch_size in (8, 4):
        before = flat_weights(model)
        fit_in_order(model, X, Y, batch_size=batch_size, steps_per_epoch=1)
        residual = 1 / (1 + np.exp(-(X @ before[:3] + before[3]))) - Y[:, 0]
        expected = np.mean(residual) * np.ones(4)
        np.testing.assert_allclose(before - flat_weights(model), expected, rtol=1e-5)
