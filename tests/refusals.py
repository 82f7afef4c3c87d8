"""A model and an optimizer that train, and what it is to refuse one that must not."""

import keras
import numpy as np
import pytest
from conftest import flat_weights

import dp2_keras as dp2

X, Y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)


def optimizer(**arguments):
    return dp2.DPSGD(0.1, 1.0, 1.0, **{"expected_batch_size": 4, **arguments})


def model_of(*layers):
    return dp2.DP2Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])


def refuses_to_compile(model, match, **arguments):
    with pytest.raises(ValueError, match=match):
        model.compile(**{"optimizer": optimizer(), "loss": "mse", **arguments})
    assert getattr(model, "optimizer", None) is None


def refuses_to_fit(model, match, error=ValueError, x=X, y=Y, optimizer=optimizer, loss="mse", **arguments):
    """Training raises, twice, and changes nothing."""
    if not getattr(model, "compiled", getattr(model, "_is_compiled", False)):
        model.compile(optimizer=optimizer(), loss=loss)
    before, steps = flat_weights(model), int(model.optimizer.iterations)
    for _ in range(2):
        with pytest.raises(error, match=match):
            model.fit(x, y, verbose=0, **{"batch_size": 4, **arguments})
    np.testing.assert_array_equal(flat_weights(model), before)
    assert int(model.optimizer.iterations) == steps
