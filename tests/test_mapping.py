"""A map over examples is right, or refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp2_keras as dp2
from dp2_keras.per_example import mapping

X = np.random.default_rng(0).normal(size=(10, 6, 3)).astype(np.float32)
WEIGHTS = tf.Variable(np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32))
each_mode = pytest.mark.parametrize("mode", ["eager", "graph"])


def mapped(function, mode):
    run = lambda x: mapping.map_examples(function, x)  # noqa: E731
    return (run if mode == "eager" else tf.function(run, autograph=False))(tf.constant(X))


@each_mode
def test_it_is_a_loop_over_examples(mode):
    function = lambda x: (tf.reduce_sum(x**2), tf.tensordot(x, WEIGHTS, 1))  # noqa: E731
    squares, products = mapped(function, mode)
    np.testing.assert_allclose(squares, (X**2).sum((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(products, X @ WEIGHTS.numpy(), rtol=1e-4, atol=1e-5)


@each_mode
@pytest.mark.parametrize(
    "product",
    [
        lambda x: tf.matmul(x[None], WEIGHTS),
        lambda x: tf.matmul(x[None], WEIGHTS[None]),
        tf.function(lambda x: tf.matmul(x[None], WEIGHTS), autograph=False),
    ],
    ids=["ranks", "rows", "function"],
)
def test_a_product_by_one_matrix_is_refused_where_it_would_be_wrong(product, mode, monkeypatch):
    monkeypatch.setattr(mapping, "_broadcasts_wrongly", lambda: True)
    with pytest.raises(ValueError, match='gets wrong inside a map over examples.*`method="ghost"`'):
        mapped(product, mode)


RIGHT = X @ X.transpose(0, 2, 1), np.einsum("ca,bta->btc", WEIGHTS.numpy().T, X)


@each_mode
@pytest.mark.parametrize(
    "product, expected",
    [
        (lambda x: tf.matmul(x[None], x[None], transpose_b=True)[0], RIGHT[0]),
        (lambda x: tf.linalg.matvec(tf.transpose(WEIGHTS)[None], x), RIGHT[1]),
    ],
    ids=["parts", "matvec"],
)
def test_a_product_that_it_gets_right_is_not(product, expected, mode, monkeypatch):
    monkeypatch.setattr(mapping, "_broadcasts_wrongly", lambda: True)
    np.testing.assert_allclose(mapped(product, mode), expected, rtol=1e-4, atol=1e-5)


def test_the_setting_that_mends_it_is_known(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert not mapping._broadcasts_wrongly()


@each_mode
def test_a_model_with_such_a_product_trains_by_ghost_and_by_no_map(mode, monkeypatch):
    monkeypatch.setattr(mapping, "_broadcasts_wrongly", lambda: True)
    for method, refused in (("auto", False), ("vectorized", mapping_product())):
        model = dp2.DP2Sequential([keras.Input((6, 3)), keras.layers.EinsumDense("abc,cd->abd", (None, 4))])
        optimizer = dp2.DPSGD(0.1, 1.0, 1.0, expected_batch_size=10)
        model.compile(optimizer, loss="mse", method=method, run_eagerly=mode == "eager", jit_compile=False)
        if refused:
            with pytest.raises(ValueError, match="gets wrong inside a map"):
                model.train_on_batch(X, np.ones((10, 6, 4)))
        else:
            model.train_on_batch(X, np.ones((10, 6, 4)))


def mapping_product():
    """Whether this Keras makes EinsumDense a batched product; Keras 2 makes it an einsum of TensorFlow's."""
    return hasattr(keras, "StatelessScope")
