"""Sums of the squares of clipped gradients, and public gradients, on the ghost path, which makes neither."""

import math

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
from ghosts import MODES, assert_close, clip_between, example_gradients, private
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import ALL, LABELS
from scipy import stats
from test_ghost import VECTORIZABLE, in_blocks_of_one, unless_slow
from test_public_optimizers import Seen
from test_sparse import X, as_halves, as_sparse, build, dense_build
from zoo import ROWS, flat

import dp2_keras as dp2
from dp2_keras import xla
from dp2_keras.per_example import contributions, each
from dp2_keras.per_example.sparse import SparseOuter
from dp2_keras.privatizer import ClippingQuery, JointQuery, SquaresQuery

ROUNDING = 1 + 1e-5


def squares_of(model, clip, mode="graph"):
    """Maps a batch to the sum of squares, flat, and the norms of the gradients."""

    def answer(x, y):
        query = SquaresQuery(model.trainable_variables, None, clip)
        result, _ = model._answer(query, (x, y, None))
        return result.clipped_sum.values, result.norms

    graph = lambda function: tf.function(function, autograph=False)  # noqa: E731
    compiled = {"eager": lambda function: function, "graph": graph, "xla": xla.compiled}[mode](answer)

    def run(x, y):
        values, norms = compiled(x, tf.constant(y))
        return flat(values), norms.numpy()

    return run


@pytest.mark.parametrize(
    "case, mode",
    [
        *((case, "graph") for case in ALL),
        *(unless_slow(case, mode) for mode in ("eager", "xla") for case in ALL if case != "conv_transpose"),
    ],
)
def test_the_sum_is_that_of_the_loop(case, mode):
    build, x = ALL[case]
    gradients = example_gradients(case)
    clip = clip_between(gradients)
    values, norms = squares_of(private(build, x), clip, mode)(x, LABELS)
    np.testing.assert_allclose(norms, np.linalg.norm(gradients, axis=1), rtol=1e-5)
    assert_close(values, sum(oracle.clip(g, clip) ** 2 for g in gradients))


@pytest.mark.parametrize("case", ["dense_over_time", "conv1d", "prelu", "lstm", "used_twice"])
def test_gradients_that_do_not_fit_in_memory_are_made_in_blocks(case, monkeypatch):
    build, x = ALL[case]
    whole = squares_of(private(build, x), 1.0)(x, LABELS)[0]
    in_blocks_of_one(monkeypatch)
    assert_close(squares_of(private(build, x), 1.0)(x, LABELS)[0], whole)


CASES = ["dense", "dense_over_time", "embedding", "conv1d", "layer_norm", "attention", "prelu"]


@pytest.mark.parametrize("case", CASES)
def test_neighbours_differ_by_at_most_the_square_of_the_clip_norm(case):
    build, x = ALL[case]
    clip = 0.3 * clip_between(example_gradients(case))
    answer = squares_of(private(build, x), clip)
    for index in (0, 4):
        others = np.arange(ROWS) != index
        without = answer(x[others], LABELS[others])[0]
        difference = answer(x, LABELS)[0] - without
        assert 0 < np.linalg.norm(difference) <= clip**2 * ROUNDING + 1e-6
        for value in (1e5, 1e12, 1e25, np.nan, np.inf):
            changed, labels = x.copy(), LABELS.copy()
            labels[index] = value
            if x.dtype == np.float32:
                changed[index] = value
            for data in ((changed, LABELS), (x, labels)):
                difference = answer(*data)[0] - without
                assert np.linalg.norm(difference) <= clip**2 * ROUNDING + 1e-6


def powers(shape, least, most):
    """Numbers of any size between powers of ten, some of them 0."""
    exponents = st.one_of(st.none(), st.integers(least, most))
    entries = st.lists(exponents, min_size=math.prod(shape), max_size=math.prod(shape))
    number = lambda p: 0.0 if p is None else 10.0**p  # noqa: E731
    return entries.map(lambda p: np.reshape([number(e) for e in p], shape).astype(np.float32))


@pytest.mark.parametrize("kind", [contributions.Outer, SparseOuter])
@settings(max_examples=60, deadline=None)
@given(a=powers((2, 3), -30, 30), d=powers((2, 2), -30, 30))
def test_gradients_are_clipped_before_they_are_squared(kind, a, d):
    """The square of an entry of 1e20 is infinite in float32; that of the clipped gradient is not."""
    rows = tf.sparse.from_dense(a) if kind is SparseOuter else tf.constant(a)
    part = kind(rows, tf.constant(d), [3, 2])
    factors, kept, _ = SquaresQuery([], None, 10.0).factors(part.squared_norms(None), tf.constant([True] * 2))
    for i in range(2):
        alone = kept & tf.constant(np.arange(2) == i)
        found = part.sum_of_squares(factors, alone).numpy().astype(np.float64)
        gradient = np.outer(np.float64(a[i]), np.float64(d[i])) if kept[i] else np.zeros((3, 2))
        assert np.linalg.norm(found) <= 100 * ROUNDING
        np.testing.assert_allclose(found, (factors[i] * gradient) ** 2, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_sparse_rows_have_the_squares_of_the_dense_and_a_bad_one_costs_only_itself(mode):
    answer, dense = squares_of(private(build, X[:0]), 0.5, mode), squares_of(private(dense_build, X), 0.5)
    assert_close(answer(as_sparse(X), LABELS)[0], dense(X, LABELS)[0])
    bad, others = X.copy(), np.arange(ROWS) != 5
    bad[5, 7] = np.nan
    assert_close(answer(as_sparse(bad), LABELS)[0], dense(X[others], LABELS[others])[0])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_entries_given_twice_are_added_before_they_are_squared(mode):
    answer = squares_of(private(build, X[:0]), 0.5, mode)
    for found, expected in zip(answer(as_halves(X), LABELS), answer(as_sparse(X), LABELS)):
        assert_close(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_has_no_squares(mode):
    build, x = ALL["transformer"]
    values, norms = squares_of(private(build, x), 1.0, mode)(x[:0], LABELS[:0])
    assert not values.any() and norms.shape == (0,)


def test_squares_of_scaled_gradients_are_refused():
    with pytest.raises(ValueError, match="`scales` must be None in a query of squares"):
        SquaresQuery([], lambda: [], 1.0)


@pytest.mark.parametrize("case", ["dense", "dense_over_time"])
def test_a_joint_query_has_both_answers_of_the_same_gradients(case, monkeypatch):
    build, x = ALL[case]
    model, made = private(build, x), []
    make = contributions.Outer.gradients
    monkeypatch.setattr(
        contributions.Outer, "gradients", lambda self, *ad: made.append(id(self)) or make(self, *ad)
    )
    queries = [kind(model.trainable_variables, None, 0.7) for kind in (SquaresQuery, ClippingQuery)]
    result, _ = model._answer(JointQuery(queries), (tf.constant(x), tf.constant(LABELS), None))
    assert len(made) == len(set(made)) and bool(made) == (case == "dense_over_time")
    clipped = [oracle.clip(g, 0.7) for g in example_gradients(case)]
    squares, sums = (flat(part.values) for part in result.clipped_sum.parts())
    assert_close(squares, np.sum(np.square(clipped), axis=0))
    assert_close(sums, np.sum(clipped, axis=0))


# Public gradients.


@pytest.mark.parametrize(
    "case, method",
    [
        *((case, "ghost") for case in ALL),
        *(unless_slow(case, "vectorized") for case in VECTORIZABLE),
        ("dense", "loop"),
    ],
)
def test_each_public_gradient_is_that_of_the_loop(case, method):
    build, x = ALL[case]
    found = each_gradient(private(build, x, method), tf.constant(x))
    np.testing.assert_allclose(found, example_gradients(case), rtol=1e-4, atol=1e-5)


def each_gradient(model, x):
    """Flat gradients [n, d] of public examples."""

    @tf.function(autograph=False)
    def gradients(x, y):
        example_pass, examples = model._passed(
            model.trainable_variables, (x, y, None), model.optimizer.random_bits
        )
        return getattr(each, model.method)(example_pass, model.trainable_variables, examples)

    found = gradients(x, tf.constant(LABELS))
    return np.concatenate([np.reshape(g, (ROWS, -1)) for g in found], axis=1)


@pytest.mark.parametrize("rows", [as_sparse, as_halves])
def test_public_gradients_of_sparse_rows_are_those_of_the_dense(rows):
    sparse = each_gradient(private(build, X[:0]), rows(X))
    np.testing.assert_allclose(sparse, each_gradient(private(dense_build, X), X), rtol=1e-5, atol=1e-6)


# The optimizer that needs both.


def subspace(kind=dp2.DPAdagradPublicSubspace, **changes):
    arguments = dict(learning_rate=0.1, l2_norm_clip=0.5, noise_multiplier=1.0, subspace_size=3, noise_seed=1)
    return kind(**{**arguments, **changes})


def test_it_trains_on_sparse_rows_as_on_the_dense():
    models = []
    for make, rows in ((build, as_sparse(X)), (dense_build, X)):
        model = dp2.make_private(make())
        model.compile(subspace(expected_batch_size=ROWS), "mse", method="ghost", public_data=(rows, LABELS))
        keras.utils.set_random_seed(1)
        for variable in model.trainable_variables:
            variable.assign(tf.random.normal(variable.shape, seed=variable.shape[0]))
        for _ in range(3):
            model.train_on_batch(rows, LABELS)
        models.append(model)
    assert models[0].privacy_plan().method == "ghost"
    np.testing.assert_allclose(*(flat(m.trainable_variables) for m in models), rtol=1e-4, atol=1e-5)


def test_both_releases_have_the_stated_noise():
    """With rows of zeros and no bias there is no gradient, and what is released is noise."""
    x, y = np.zeros((4, 100), np.float32), np.ones((4, 200), np.float32)
    model = dp2.DP2Sequential([keras.Input((100,)), keras.layers.Dense(200, use_bias=False)])
    optimizer = subspace(Seen, l2_norm_clip=3.0, noise_multiplier=1.5, expected_batch_size=4)
    model.compile(optimizer, "mse", method="ghost", public_data=(x, y), run_eagerly=True)
    model.train_on_batch(x, y)
    for noise, sensitivity in zip(optimizer.seen, (9.0, 3.0)):
        noise, stated = np.ravel(noise), 1.5 * sensitivity / 4
        assert stats.kstest(noise, "norm", args=(0, stated)).pvalue > 1e-3
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(noise, "norm", args=(0, wrong * stated)).pvalue < 1e-9
