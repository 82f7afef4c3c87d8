"""Noise: the transform at the top of noise.py, its tail, its law and its addresses.

All draws are seeded, so a statistical test that passes once passes always.
"""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from dp2_keras.noise import NoiseSource, normals_from_words

STEP = tf.constant(0, tf.int64)


def box_muller(words, angles):
    radius = np.sqrt(-2 * np.log(np.minimum((words.astype(np.float64) + 0.5) / 2.0**64, 1)))
    turn = 2 * np.pi * angles.astype(np.float64) / 2**32
    return np.concatenate([radius * np.cos(turn), radius * np.sin(turn)])


def normals(words, angles, **kwargs):
    return normals_from_words(tf.constant(words, tf.uint64), tf.constant(angles, tf.uint32), **kwargs).numpy()


@pytest.mark.parametrize("stddev", [0.0, 1.0, 2.5])
def test_the_transform_is_box_muller(stddev):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**64, size=10_000, dtype=np.uint64)
    angles = rng.integers(0, 2**32, size=10_000, dtype=np.uint32)
    expected = stddev * box_muller(words, angles)
    np.testing.assert_allclose(normals(words, angles, stddev=stddev), expected, atol=5e-6 * max(stddev, 1))


@pytest.mark.parametrize("sigmas", [5.0, 5.68, 6.0, 7.0, 8.0, 9.0])
def test_forced_bits_reach_far_into_the_tail(sigmas):
    word = int(np.exp(-(sigmas**2) / 2) * 2**64)
    np.testing.assert_allclose(normals([word], [0])[0], sigmas, rtol=1e-5)


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_extreme_bits_give_finite_normals(word):
    drawn = normals([word], [word % 2**32])
    assert np.all(np.isfinite(drawn)) and np.all(np.abs(drawn) < 9.5)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
def test_no_word_is_used_twice(size):
    """Each pair has its own words, whatever the size: the halves of a pair are no other pair's."""
    drawn = NoiseSource(seed=0).normal([size], STEP, stream=0).numpy()
    pairs = -(-size // 2)
    words = NoiseSource(seed=0).bits([pairs + -(-pairs // 2)], STEP, stream=0, dtype=tf.uint64).numpy()
    expected = box_muller(words[:pairs], words[pairs:].view(np.uint32)[:pairs])
    np.testing.assert_allclose(drawn, expected[:size], atol=5e-6)


@pytest.fixture(scope="module")
def sample():
    return NoiseSource(seed=0).normal([2_000_000], STEP, stream=0).numpy().astype(np.float64)


def test_moments(sample):
    n = len(sample)
    for power, expected, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(np.mean(sample**power) - expected) < 4 * np.sqrt(variance / n)


def test_law_accepts_the_right_deviation_and_rejects_others(sample):
    assert stats.kstest(sample, "norm").pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2, 1.01):
        assert stats.kstest(sample, "norm", args=(0, wrong)).pvalue < 1e-9


@pytest.mark.parametrize("sigmas", [2, 3, 4])
def test_tail_mass(sample, sigmas):
    expected = len(sample) * 2 * stats.norm.sf(sigmas)
    assert abs(np.sum(np.abs(sample) > sigmas) - expected) < 4 * np.sqrt(expected)


ADDRESSES = st.tuples(st.integers(0, 2**40 - 1), st.integers(0, 255), st.integers(0, 2**16 - 1))


@hypothesis.given(ADDRESSES, ADDRESSES)
@hypothesis.settings(deadline=None, max_examples=30)
def test_noise_is_injective_in_draw_stream_and_variable(first, second):
    source = NoiseSource(seed=0)
    bits = [
        source.bits([4], tf.constant(draw, tf.int64), stream=stream, variable=variable).numpy()
        for draw, stream, variable in (first, second)
    ]
    assert np.array_equal(*bits) == (first == second)


def test_tensors_of_a_run_are_uncorrelated():
    source, n = NoiseSource(seed=0), 20_000
    addresses = [(draw, stream, variable) for draw in (0, 1) for stream in (0, 1) for variable in (0, 1)]
    tensors = [
        source.normal([n], tf.constant(d, tf.int64), stream=s, variable=v).numpy() for d, s, v in addresses
    ]
    correlations = np.corrcoef(tensors) - np.eye(len(tensors))
    assert np.max(np.abs(correlations)) < 5 / np.sqrt(n)


def test_words_of_a_run_are_distinct():
    source = NoiseSource(seed=0)
    words = [
        source.bits([1000, 4], tf.constant(t, tf.int64), stream=0, variable=v) for t in (0, 1) for v in (0, 1)
    ]
    blocks = np.concatenate(words).view("V16")
    assert len(np.unique(blocks)) == len(blocks)


@pytest.mark.parametrize("dtype", [tf.uint32, tf.uint64])
@pytest.mark.parametrize("jit", [False, True])
def test_graph_and_xla_draw_what_eager_draws(jit, dtype):
    source = NoiseSource(seed=0)
    draw = lambda: source.bits([7, 3], STEP, stream=1, variable=2, dtype=dtype)  # noqa: E731
    np.testing.assert_array_equal(tf.function(draw, jit_compile=jit)(), draw())


def test_a_seed_repeats_and_ties_the_draw_to_the_step():
    first, second = NoiseSource(seed=5), NoiseSource(seed=5)
    assert first.next_draw(tf.constant(3, tf.int64)) == 3
    np.testing.assert_array_equal(first.normal([9], STEP, stream=0), second.normal([9], STEP, stream=0))


def test_without_a_seed_keys_are_secret_and_draws_never_repeat():
    first, second = NoiseSource(), NoiseSource()
    assert [int(first.next_draw(STEP)) for _ in range(3)] == [1, 2, 3]
    draws = [first.next_draw(STEP), first.next_draw(STEP)]  # Held, and read only later.
    assert [int(draw) for draw in draws] == [4, 5]
    assert not np.array_equal(first.bits([8], STEP, stream=0), second.bits([8], STEP, stream=0))


@pytest.mark.parametrize("address", [dict(stream=256), dict(stream=-1), dict(stream=0, variable=2**16)])
def test_addresses_out_of_range_are_refused(address):
    with pytest.raises(ValueError, match="must be below"):
        NoiseSource(seed=0).bits([1], STEP, **address)
