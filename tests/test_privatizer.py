"""Sensitivity and deviation: what one example can do, and the noise that hides it."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
from conftest import logistic_model
from scipy import stats

import dp2_keras as dp2
from dp2_keras.noise import NoiseSource
from dp2_keras.privatizer import ClippedSum, ClippingQuery, GaussianPrivatizer, JointQuery, add_noise

ROUNDING = 1 + 1e-5


def query(scales=None, clip=1.0):
    variables = [tf.Variable(tf.zeros([2, 3])), tf.Variable(tf.zeros([4]))]
    return ClippingQuery(variables, scales and (lambda: scales), clip)


def clip(query, rows, mask=None):
    """The clipped sum of flat gradients [n, 10], as one flat vector."""
    rows = np.asarray(rows, np.float32).reshape(-1, 10)
    gradients = [tf.constant(rows[:, :6].reshape(-1, 2, 3)), tf.constant(rows[:, 6:])]
    values, norms = query.clip(gradients, tf.constant(np.ones(len(rows), bool) if mask is None else mask))
    return np.concatenate([np.ravel(v) for v in values]), norms.numpy()


@pytest.mark.parametrize("clip_norm", [0.5, 3.0, np.inf])
def test_closed_form_with_example_i_filled_with_i(clip_norm):
    rows = np.arange(5.0)[:, None] * np.ones(10)
    total, norms = clip(query(clip=clip_norm), rows)
    np.testing.assert_allclose(norms, np.arange(5) * np.sqrt(10), rtol=1e-6)
    expected = sum(np.minimum(i * np.sqrt(10), clip_norm) for i in range(5)) / np.sqrt(10)
    np.testing.assert_allclose(total, np.full(10, expected), rtol=1e-5)


finite = st.floats(-1e4, 1e4, width=32)
rows_of = lambda n: hnp.arrays(np.float32, (n, 10), elements=finite)  # noqa: E731
scales_of = hnp.arrays(np.float32, 10, elements=st.floats(2**-10, 2**10, width=32))
settings = hypothesis.settings(deadline=None, max_examples=60)


def split(flat):
    return [tf.constant(flat[:6].reshape(2, 3)), tf.constant(flat[6:])]


@settings
@hypothesis.given(rows_of(3), scales_of, st.floats(2**-6, 2**6, width=32))
def test_the_sum_is_the_oracle_s(rows, scale, clip_norm):
    total, _ = clip(query(split(scale), clip_norm), rows)
    expected = sum(oracle.clip(scale.astype(np.float64) * row, clip_norm) for row in rows)
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-4 * clip_norm)


@settings
@hypothesis.given(rows_of(4), scales_of, st.floats(2**-6, 2**6, width=32), st.booleans())
def test_neighbours_differ_by_at_most_the_clip_norm(rows, scale, clip_norm, scaled):
    q = query(split(scale) if scaled else None, clip_norm)
    total, _ = clip(q, rows[:3])
    removed, _ = clip(q, rows[:2])
    replaced, _ = clip(q, rows[[0, 1, 3]])
    bound = clip_norm * ROUNDING
    slack = 1e-5 * 4 * clip_norm
    assert np.linalg.norm(total - removed) <= bound + slack
    assert np.linalg.norm(total - replaced) <= 2 * bound + slack


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("clip_norm", [1.0, np.inf])
def test_a_bad_example_costs_only_itself(bad, clip_norm):
    good = np.linspace(-1, 1, 20).reshape(2, 10)
    poisoned = np.concatenate([good, np.full((1, 10), 0.5)])
    poisoned[2, 7] = bad
    total, norms = clip(query(clip=clip_norm), poisoned)
    np.testing.assert_array_equal(total, clip(query(clip=clip_norm), good)[0])
    assert norms[2] == 0


def test_padding_is_left_out_whatever_it_holds():
    rows = np.concatenate([np.ones((1, 10)), np.full((1, 10), np.nan), np.full((1, 10), 7.0)])
    total, _ = clip(query(clip=2.0), rows, mask=[True, False, False])
    np.testing.assert_allclose(total, clip(query(clip=2.0), rows[:1])[0])


@pytest.mark.parametrize("size", [0, 1, 5])
def test_any_batch_size_has_a_sum(size):
    total, norms = clip(query(), np.ones((size, 10)))
    np.testing.assert_allclose(total, size * np.ones(10) / np.sqrt(10), rtol=1e-6)
    assert norms.shape == (size,)


@pytest.mark.parametrize(
    "clip_norm, sigma",
    [
        (0.0, 1.0),
        (-1.0, 1.0),
        (np.nan, 1.0),
        (1.0, -1.0),
        (1.0, np.inf),
        (1.0, np.nan),
        (np.inf, 1.0),
        ("1", 1.0),
    ],
)
def test_refuses_what_has_no_meaning(clip_norm, sigma):
    with pytest.raises(ValueError, match="must be .* Received: "):
        GaussianPrivatizer(clip_norm, sigma)


def test_no_noise_is_zero_even_without_a_clip():
    assert GaussianPrivatizer(np.inf, 0.0).noise_stddev == 0.0


# The whole path: a model, its optimizer, and neighbouring data sets.

DELAY = dict(sgd_steps=2, adaptive_steps=2, sgd_l2_norm_clip=0.3, sgd_learning_rate=0.5, eps=1e-4)


def clipping(model):
    """Maps a batch to what the coming step would add noise to, and to its sensitivity."""

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, n]) for n in (5, 1)])
    def answer(x, y):
        q = model.optimizer.begin_step(model.trainable_variables)
        result, _ = model._answer(q, (x, y, None))
        return tf.concat([tf.reshape(v, [-1]) for v in result.clipped_sum.values], axis=0), q.l2_norm_clip

    return lambda x, y: [value.numpy() for value in answer(x, y)]


@pytest.mark.parametrize("step", range(6))
def test_neighbouring_data_sets_in_both_phases_and_across_the_boundary(step):
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(8, 5)).astype(np.float32) * 50, (rng.random((8, 1)) < 0.5).astype(np.float32)
    optimizer = dp2.DP2RMSprop(0.1, 2.0, 0.5, expected_batch_size=8, noise_seed=1, **DELAY)
    model = logistic_model(5, optimizer)
    for _ in range(step):
        model.train_on_batch(x, y)
    clipped_sum = clipping(model)
    total, bound = clipped_sum(x, y)
    assert bound == np.float32(2.0 if step % 4 >= 2 else 0.3)
    for i in range(8):
        others = np.arange(8) != i
        assert np.linalg.norm(total - clipped_sum(x[others], y[others])[0]) <= bound * ROUNDING
        other = x.copy()
        other[i] *= -1
        assert np.linalg.norm(total - clipped_sum(other, y)[0]) <= 2 * bound * ROUNDING
        other[i] = np.nan
        np.testing.assert_allclose(clipped_sum(other, y)[0], clipped_sum(x[others], y[others])[0], atol=1e-5)
    np.testing.assert_array_equal(clipped_sum(x[:0], y[:0])[0], np.zeros(6))
    one = clipped_sum(x[:1], y[:1])[0]
    assert np.linalg.norm(one) <= bound * ROUNDING


def test_the_preconditioner_depends_on_private_gradients_alone():
    """Frozen noise, one example changed: v moves no more than clipped, averaged gradients can."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 5)).astype(np.float32), (rng.random((8, 1)) < 0.5).astype(np.float32)
    other = x.copy()
    other[3] = 1e6
    moments = []
    for features in (x, other):
        optimizer = dp2.DP2Adagrad(
            0.0, 2.0, 0.5, expected_batch_size=8, noise_seed=1, **{**DELAY, "sgd_learning_rate": 0.0}
        )
        model = logistic_model(5, optimizer)
        for _ in range(3):
            model.train_on_batch(features, y)
        moments.append(np.concatenate([np.ravel(np.sqrt(v.numpy())) for v in optimizer._second_moments]))
    assert np.linalg.norm(moments[0] - moments[1]) <= 2 * 0.3 / 8 * ROUNDING
    assert np.linalg.norm(moments[0] - moments[1]) > 0


class Wide(keras.layers.Layer):
    """Weights that no example has a gradient for: what moves them is noise."""

    def build(self, input_shape):
        self.bias = self.add_weight(shape=(20_000,), initializer="zeros", name="bias")

    def call(self, inputs):
        return inputs[:, :1] + 0.0 * self.bias[0]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("make, deviations", [
    (lambda **k: dp2.DPSGD(1.0, 2.0, 1.5, **k), [2.0] * 2),
    (lambda **k: dp2.DP2NoiseFloor(1.0, 2.0, 1.5, delay=1, shrinkage=0, **k), [2.0] * 2),
    (lambda **k: dp2.DP2Yogi(1.0, 2.0, 1.5, delay=1, sgd_l2_norm_clip=0.5, **k), [0.5, 2.0, 0.5]),
])  # fmt: skip
def test_noise_of_a_step_has_exactly_the_stated_deviation(make, deviations, jit):
    model = dp2.DP2Sequential([keras.Input((1,)), Wide()])
    model.compile(optimizer=make(expected_batch_size=4, noise_seed=7), loss="mse", jit_compile=jit)
    before = np.zeros(20_000)
    for clip_norm in deviations:
        model.train_on_batch(np.ones((3, 1)), np.ones((3, 1)))
        after = model.trainable_variables[0].numpy()
        stated, noise, before = 1.5 * clip_norm / 4, before - after, after
        assert stats.kstest(noise, "norm", args=(0, stated)).pvalue > 1e-3
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(noise, "norm", args=(0, wrong * stated)).pvalue < 1e-9


def test_each_of_two_releases_has_its_own_sensitivity():
    """Extra query: the unscaled sum under one clip norm, the scaled one under another."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 5)).astype(np.float32) * 50, (rng.random((8, 1)) < 0.5).astype(np.float32)
    arguments = dict(delay=3, sgd_l2_norm_clip=0.3, expected_batch_size=8, noise_seed=1, eps=1e-4)
    model = logistic_model(5, dp2.DP2RMSpropExtraQuery(0.1, 2.0, 0.5, **arguments))
    model.train_on_batch(x, y)
    clipped_sum = clipping(model)
    for i in range(8):
        others = np.arange(8) != i
        change = clipped_sum(x, y)[0] - clipped_sum(x[others], y[others])[0]
        assert 0 < np.linalg.norm(change[:6]) <= 0.3 * ROUNDING
        assert 0 < np.linalg.norm(change[6:]) <= 2.0 * ROUNDING


def test_neighbours_differ_by_at_most_the_clip_norm_under_a_scale_relative_to_the_noise():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 5)).astype(np.float32) * 50, (rng.random((8, 1)) < 0.5).astype(np.float32)
    model = logistic_model(5, dp2.DP2NoiseFloor(0.1, 0.3, 0.05, delay=1, expected_batch_size=8, noise_seed=1))
    for _ in range(3):
        model.train_on_batch(x, y)
    scale = model.optimizer._scale(model.trainable_variables[0]).numpy()
    assert 0 < scale.min() < 0.5 and scale.max() <= 1
    clipped_sum = clipping(model)
    for i in range(8):
        others = np.arange(8) != i
        change = clipped_sum(x, y)[0] - clipped_sum(x[others], y[others])[0]
        assert 0 < np.linalg.norm(change) <= 0.3 * ROUNDING


def test_each_of_two_releases_has_its_own_noise():
    model = dp2.DP2Sequential([keras.Input((1,)), Wide()])
    optimizer = dp2.DP2AdagradExtraQuery(
        1.0, 2.0, 1.5, delay=9, sgd_l2_norm_clip=0.5, expected_batch_size=4, noise_seed=7
    )
    model.compile(optimizer, loss="mse")
    path = [np.zeros(20_000)]
    for _ in range(2):
        model.train_on_batch(np.ones((3, 1)), np.ones((3, 1)))
        path.append(model.trainable_variables[0].numpy())
    first, second = optimizer._gradient_sums[0].numpy(), path[1] - path[2]
    for noise, clip_norm in ((path[0] - path[1], 0.5), (first, 0.5), (second, 2.0)):
        assert stats.kstest(noise, "norm", args=(0, 1.5 * clip_norm / 4)).pvalue > 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(20_000)


def test_noise_reaches_the_last_bit_of_a_sum_of_float64():
    """Noise of float32 has no bits below 2^-34 or so; those of the sum must not stay."""
    value = tf.constant(np.pi * 10.0 ** np.arange(-6.0, 1.0), tf.float64)
    clipped, source = ClippedSum(query(), [value]), NoiseSource(seed=0)
    (noisy,) = add_noise(clipped, tf.constant(1.0), source, tf.constant(0, tf.int64), 0, [0])
    assert noisy.dtype == tf.float64
    np.testing.assert_array_equal(noisy, np.float32(noisy))


@pytest.mark.parametrize("size", [10, 40_000])  # Small variables' noise is drawn together, large ones' apart.
def test_every_variable_has_noise_of_its_own(size):
    variables = [tf.zeros([size]) for _ in range(3)]
    clipped = ClippedSum(ClippingQuery(variables, None, 1.0), variables)
    noisy = add_noise(clipped, 1.0, NoiseSource(seed=0), tf.constant(0, tf.int64), 0, [0, 1, 2])
    correlations = np.corrcoef([noise.numpy() for noise in noisy]) - np.eye(3)
    assert np.abs(correlations).max() < (0.95 if size == 10 else 5 / np.sqrt(size))


def test_noise_is_new_in_every_step_without_a_seed():
    model = dp2.DP2Sequential([keras.Input((1,)), Wide()])
    model.compile(optimizer=dp2.DPSGD(1.0, 1.0, 1.0, expected_batch_size=1), loss="mse")
    path = [np.zeros(20_000)]
    for _ in range(3):
        model.train_on_batch(np.ones((1, 1)), np.ones((1, 1)))
        path.append(model.trainable_variables[0].numpy())
    steps = np.diff(path, axis=0)
    assert np.max(np.abs(np.corrcoef(steps) - np.eye(3))) < 5 / np.sqrt(20_000)


# The guard.


def test_a_clipped_sum_serves_one_step_of_its_own_optimizer():
    model = logistic_model(5, dp2.DPSGD(1.0, 1.0, 1.0, expected_batch_size=2))
    optimizer, variables = model.optimizer, model.trainable_variables
    q = optimizer.begin_step(variables)
    answer = ClippedSum(q, q.zeros())
    optimizer.finish_step(answer)
    stale = optimizer.begin_step(variables)
    optimizer.begin_step(variables)
    for wrong in (answer, ClippedSum(stale, stale.zeros()), ClippedSum(query(), q.zeros()), q.zeros()):
        with pytest.raises(dp2.NonPrivateUpdateError, match="takes the ClippedSum"):
            optimizer.finish_step(wrong)


def test_several_releases_have_no_noise_in_common():
    """Each has its own sensitivity: their sums get noise one by one, or not at all."""
    joint = JointQuery([query(clip=5.0), query(clip=1.0)])
    clipped = ClippedSum(joint, joint.zeros())
    with pytest.raises(AttributeError, match="sensitivity"):
        add_noise(clipped, 1.0, NoiseSource(0), tf.constant(0, tf.int64), 0, [0, 1])
    assert [part.query.sensitivity for part in clipped.parts()] == [5.0, 1.0]
