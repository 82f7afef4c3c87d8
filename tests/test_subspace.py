"""The query of squares and the projection that `DPAdagradPublicSubspace` is made of, by themselves."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import oracle
import pytest
import tensorflow as tf
import zoo
from test_privatizer import ROUNDING

from dp2_keras import subspace as subspaces
from dp2_keras.privatizer import SquaresQuery


def squares(rows, clip_norm=1.0, mask=None):
    """The squares of flat gradients [n, 10] of two variables, summed."""
    variables = [tf.Variable(tf.zeros([2, 3])), tf.Variable(tf.zeros([4]))]
    query, rows = SquaresQuery(variables, None, clip_norm), np.asarray(rows, np.float32)
    gradients = [tf.constant(rows[:, :6].reshape(-1, 2, 3)), tf.constant(rows[:, 6:])]
    values, norms = query.clip(gradients, tf.constant(np.ones(len(rows), bool) if mask is None else mask))
    return zoo.flat(values), norms.numpy()


@pytest.mark.parametrize("clip_norm", [0.5, 3.0, np.inf])
def test_squares_of_example_i_filled_with_i(clip_norm):
    total, norms = squares(np.arange(5.0)[:, None] * np.ones(10), clip_norm)
    np.testing.assert_allclose(norms, np.arange(5) * np.sqrt(10), rtol=1e-6)
    expected = sum(np.minimum(i * np.sqrt(10), clip_norm) ** 2 for i in range(5)) / 10
    np.testing.assert_allclose(total, np.full(10, expected), rtol=1e-5)


finite = st.floats(-(2.0**60), 2.0**60, width=32)


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(hnp.arrays(np.float32, (3, 10), elements=finite), st.floats(1e-3, 1e3))
def test_one_example_changes_the_squares_by_the_square_of_the_clip_norm(rows, clip_norm):
    query = SquaresQuery([], None, clip_norm)
    assert query.sensitivity == clip_norm**2
    total, without = squares(rows, clip_norm)[0], squares(rows[1:], clip_norm)[0]
    rounding = 1e-6 * np.linalg.norm(total)
    assert np.all(np.isfinite(total)) and np.all(total >= 0)
    assert np.linalg.norm(total - without) <= query.sensitivity * ROUNDING + rounding
    assert np.linalg.norm(squares(rows[:1], clip_norm)[0]) <= query.sensitivity * ROUNDING


def test_bad_and_masked_examples_are_left_out_of_the_squares():
    rows = np.ones((4, 10), np.float32)
    rows[1, 3], rows[2, 9] = np.nan, np.inf
    total, norms = squares(rows, 1.0, mask=[True, True, True, False])
    np.testing.assert_allclose(total, np.full(10, 0.1), rtol=1e-6)
    np.testing.assert_array_equal(norms > 0, [True, False, False, False])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_projection_is_that_of_the_full_matrix(size):
    rng = np.random.default_rng(1)
    rows, vector = rng.normal(size=(4, 10)) * np.arange(1, 5)[:, None], rng.normal(size=10)

    def parts(t):  # The shapes of two variables, behind any other axes.
        t = tf.constant(t, tf.float32)
        return [tf.reshape(t[..., :6], [*t.shape[:-1], 2, 3]), t[..., 6:]]

    project = lambda s: zoo.flat(subspaces.project(parts(s), parts(rows), size))  # noqa: E731
    expected = oracle.top_projection(rows, size) @ vector
    np.testing.assert_allclose(project(vector), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(project(project(vector)), expected, rtol=1e-4, atol=1e-5)


def test_directions_that_no_gradient_has_are_left_out():
    twice = np.float32([[3.0, 4.0, 0.0]] * 2)
    (one,) = subspaces.project([tf.constant([1.0, 1.0, 1.0])], [tf.constant(twice)], 2)
    np.testing.assert_allclose(one, 7 / 25 * twice[0], rtol=1e-5)
    (none,) = subspaces.project([tf.constant([1.0, 1.0, 1.0])], [tf.zeros([2, 3])], 2)
    np.testing.assert_array_equal(none, np.zeros(3))
