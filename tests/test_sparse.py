"""Sparse rows into a dense layer: the sums of the dense rows, without making them."""

import contextlib

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from conftest import fit_in_order
from keras import layers
from test_ghost import LABELS, PHASES, answer_function, assert_close, private, shapes_in

from dp2_keras.per_example import sparse

FEATURES = 37


def build(is_sparse=True):
    inputs = keras.Input((FEATURES,), sparse=is_sparse)
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(4, "tanh")(inputs)))


def dense_build():
    return build(is_sparse=False)


def bags_of_words():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, FEATURES)).astype(np.float32) * (rng.random((10, FEATURES)) < 0.1)
    x[3] = 0.0  # An empty row.
    return x.astype(np.float32)


X = bags_of_words()


def as_sparse(x):
    return tf.sparse.from_dense(x)


def sparse_sum(model, phase, x, mode="graph"):
    def answer(x, y):
        query = model.optimizer.begin_step(model.trainable_variables)
        result, _ = model._answer(query, (x, y, None))
        return result.clipped_sum.values, result.norms

    model.optimizer.iterations.assign(PHASES.index(phase))
    values, _ = (answer if mode == "eager" else tf.function(answer))(x, tf.constant(LABELS[: x.shape[0]]))
    return np.concatenate([np.ravel(v) for v in values])


@pytest.mark.parametrize("method", ["auto", "ghost"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("phase", PHASES)
def test_the_clipped_sum_is_that_of_the_dense_rows(phase, mode, method):
    model = private(build, X[:0], method)
    ours = sparse_sum(model, phase, as_sparse(X), mode)
    assert_close(ours, answer_function(private(dense_build, X))(phase, X, LABELS)[0])


@pytest.mark.parametrize("phase", PHASES)
def test_a_bad_row_costs_only_itself(phase):
    model, bad = private(build, X[:0]), X.copy()
    bad[5, 7] = np.nan
    others = np.arange(10) != 5
    dense = answer_function(private(dense_build, X))(phase, X[others], LABELS[others])[0]
    assert_close(sparse_sum(model, phase, as_sparse(bad)), dense)


def as_halves(x):
    """Every entry given twice, by half of it, and in no order."""
    halves = as_sparse(x / 2)
    order = np.random.default_rng(0).permutation(2 * len(halves.values))
    indices, values = tf.repeat(halves.indices, 2, axis=0), tf.repeat(halves.values, 2)
    return tf.SparseTensor(tf.gather(indices, order), tf.gather(values, order), halves.dense_shape)


@pytest.mark.parametrize("phase", PHASES)
def test_entries_given_twice_are_added_before_the_norm(phase):
    model = private(build, X[:0])
    assert_close(sparse_sum(model, phase, as_halves(X)), sparse_sum(model, phase, as_sparse(X)))


def test_a_layer_of_sparse_rows_is_used_once():
    rows = keras.Input((FEATURES,), sparse=True)
    dense = layers.Dense(2)
    model = keras.Model(rows, layers.Add()([dense(rows), dense(rows)]))
    with pytest.raises(ValueError, match="Dense layer of sparse rows must be used once"):
        sparse_sum(private(lambda: model, X), "sgd", as_sparse(X))


def test_the_dense_row_is_never_made():
    model = private(build, X[:0])
    model.optimizer.iterations.assign(1)

    def answer(x, y):
        query = model.optimizer.begin_step(model.trainable_variables)
        return model._answer(query, (x, y, None))[0].clipped_sum.values

    spec = tf.SparseTensorSpec([10, FEATURES], tf.float32)
    graph = tf.function(answer).get_concrete_function(spec, tf.constant(LABELS)).graph
    assert not {(10, FEATURES), (10, FEATURES, 4)} & shapes_in(graph)


def test_the_unscaled_norm_in_its_place_is_found_out(monkeypatch):
    right = sparse_sum(private(build, X[:0]), "adaptive", as_sparse(X))
    method = sparse.SparseOuter.squared_norms
    monkeypatch.setattr(sparse.SparseOuter, "squared_norms", lambda self, scale: method(self, None))
    with pytest.raises(AssertionError):
        assert_close(sparse_sum(private(build, X[:0]), "adaptive", as_sparse(X)), right)


def fit_poisson(model, x, y, **kwargs):
    model.fit(x, y, verbose=0, **kwargs)


@pytest.mark.parametrize("fit", [fit_in_order, fit_poisson])
@pytest.mark.parametrize("wrap", [scipy.sparse.csr_matrix, as_sparse])
def test_fit_takes_sparse_rows(wrap, fit):
    model = private(build, X[:0], "auto", jit_compile=False)
    dense = private(dense_build, X, jit_compile=False)
    for trained, x in ((model, wrap(X)), (dense, X)):
        fit(trained, x, LABELS, batch_size=4, epochs=2)
    for ours, theirs in zip(model.trainable_variables, dense.trainable_variables):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5)


def test_poisson_batches_of_a_sparse_input_stay_sparse():
    model, matrix = private(build, X[:0], "auto", jit_compile=False), scipy.sparse.csr_matrix(X)
    seen = []
    model.call = lambda inputs, call=model.call, **kwargs: seen.append(type(inputs)) or call(inputs, **kwargs)
    with no_dense_rows(matrix):
        model.fit(matrix, LABELS, batch_size=4, validation_split=0.2, verbose=0)
    assert seen and all(issubclass(kind, tf.SparseTensor) for kind in seen)


@contextlib.contextmanager
def no_dense_rows(matrix):
    """Inside, a scipy matrix that is made dense is an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(matrix), "toarray", lambda *_: pytest.fail("The rows were made dense."))
        yield


def test_methods_that_take_rows_apart_refuse_them():
    with pytest.raises(ValueError, match='need `method="ghost"`'):
        sparse_sum(private(build, X[:0], "vectorized"), "sgd", as_sparse(X))
    with pytest.raises(ValueError, match="no `physical_batch_size`"):
        sparse_sum(private(build, X[:0], physical_batch_size=2), "sgd", as_sparse(X))
