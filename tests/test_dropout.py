"""Each example and each step has dropout masks of its own.

With a linear loss and no bias, an example's gradient is its own input, dropped out.
"""

import keras
import numpy as np
import pytest
from keras import layers
from test_models import SEED, train
from zoo import flat

import dp2_keras as dp2

FEATURES = 32


def one_layer():
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dropout(0.5), layers.Dense(1, use_bias=False)])


def one_layer_used_twice():
    x, dropout = keras.Input((FEATURES,)), layers.Dropout(0.5)
    return keras.Model(x, layers.Dense(1, use_bias=False)(layers.Concatenate()([dropout(x), dropout(x)])))


def dropped_inputs(build, rows, seed=SEED, steps=1, **compile_arguments):
    """What is left of a batch of equal rows in each step, their mean: [steps, features]."""
    model = dp2.make_private(build())
    model.compile(
        dp2.DPSGD(1.0, np.inf, 0.0, expected_batch_size=rows, noise_seed=seed),
        loss=lambda y, y_pred: -y_pred, **compile_arguments,
    )  # fmt: skip
    x, y = np.full((rows, FEATURES), 0.5, np.float32), np.zeros((rows, 1), np.float32)
    weights = [flat(model.trainable_variables)]
    weights += list(train(model, x, y, [slice(None)] * steps))
    return np.round(np.diff(weights, axis=0), 4)


each_way = pytest.mark.parametrize(
    "arguments",
    [dict(run_eagerly=True), dict(jit_compile=False), dict(jit_compile=True), dict(method="loop"),
     dict(physical_batch_size=1)],
    ids=str,
)  # fmt: skip


@each_way
def test_each_example_and_each_step_has_its_own_dropout_mask(arguments):
    first, second = dropped_inputs(one_layer, rows=2, steps=2, **arguments)
    assert set(first) == {0.0, 0.5, 1.0}  # 0.5: dropped in one of the two equal rows.
    assert not np.array_equal(first, second)


@each_way
def test_a_layer_used_twice_has_a_mask_for_each_use(arguments):
    (both,) = dropped_inputs(one_layer_used_twice, rows=1, **arguments)
    assert set(both) == {0.0, 1.0}
    assert not np.array_equal(both[:FEATURES], both[FEATURES:])


@pytest.mark.parametrize("arguments", [dict(jit_compile=False), dict(jit_compile=True)], ids=str)
def test_dropout_masks_follow_the_noise_seed(arguments):
    once, again, other = (dropped_inputs(one_layer, 3, seed, 2, **arguments) for seed in (1, 1, 2))
    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(once, other)


@pytest.mark.parametrize(
    "layer", [layers.Dropout, layers.GaussianDropout, layers.GaussianNoise, layers.AlphaDropout]
)
def test_each_random_layer_treats_equal_examples_differently(layer):
    def build():
        return keras.Sequential([keras.Input((FEATURES,)), layer(0.5), layers.Dense(1, use_bias=False)])

    (one,), (mean_of_two,) = (dropped_inputs(build, rows, jit_compile=False) for rows in (1, 2))
    another = 2 * mean_of_two - one
    assert np.abs(another - one).max() > 0.1


def test_dropout_masks_without_a_seed_are_never_the_same():
    once, again = (dropped_inputs(one_layer, 3, None, jit_compile=False) for _ in range(2))
    assert not np.array_equal(once, again)


@pytest.mark.parametrize("arguments", [dict(physical_batch_size=2), dict(method="loop")], ids=str)
def test_dropout_masks_do_not_depend_on_how_gradients_are_computed(arguments):
    whole = dropped_inputs(one_layer, 3, jit_compile=False, method="vectorized")
    ours = dropped_inputs(one_layer, 3, jit_compile=False, **{"method": "vectorized", **arguments})
    np.testing.assert_array_equal(ours, whole)
