"""Secure noise: a cipher's words, normals of the stated law, releases on a grid whatever the sum."""

import builtins

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import dp2_keras as dp2
from dp2_keras import secure_noise
from dp2_keras.privatizer import ClippedSum, ClippingQuery, add_noise
from dp2_keras.secure_noise import STEPS_PER_DEVIATION, SecureNoiseSource

DRAW = tf.constant(3, tf.int64)
SIGMA, CLIP = 2.0, 0.5
GAMMA = SIGMA * CLIP / STEPS_PER_DEVIATION


def released(values, source=None, draw=0):
    """The noisy sum of one variable, as a step releases it."""
    values = tf.convert_to_tensor(values)
    query = ClippingQuery([tf.zeros(values.shape)], None, CLIP)
    clipped = ClippedSum(query, [values])
    source = source or SecureNoiseSource()
    return add_noise(clipped, SIGMA, source, tf.constant(draw, tf.int64), 0, [0])[0].numpy()


def test_words_are_the_cipher_of_counted_blocks():
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    source = SecureNoiseSource(seed=1)
    key = secure_noise._fresh_secret(1)
    upper = (3 << 24 | 2 << 16 | 5).to_bytes(8, "big")
    blocks = b"".join(upper + count.to_bytes(8, "big") for count in range(3))
    expected = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks)
    words = source.bits([3, 4], DRAW, stream=2, variable=5)
    assert words.numpy().tobytes() == expected and words.shape == (3, 4)
    assert source.bits([6], DRAW, stream=2, variable=5, dtype=tf.uint64).numpy().tobytes() == expected


def test_addresses_are_apart_and_refused_out_of_range():
    source = SecureNoiseSource(seed=0)
    drawn = {
        source.bits([4], tf.constant(draw, tf.int64), stream=stream, variable=variable).numpy().tobytes()
        for draw in (0, 1)
        for stream in (0, 1)
        for variable in (0, 1)
    }
    assert len(drawn) == 8
    with pytest.raises(ValueError, match="`stream` must be below 256"):
        source.bits([1], DRAW, stream=256)


def test_normals_follow_the_law():
    sample = SecureNoiseSource().normal([1_000_000], DRAW, stream=0, stddev=3.0).numpy().astype(np.float64)
    assert stats.kstest(sample / 3.0, "norm").pvalue > 1e-4
    assert abs(np.mean(sample)) < 5 * 3.0 / 1e3 and abs(np.std(sample) / 3.0 - 1) < 5e-3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_release_is_on_the_grid_whatever_the_sum(dtype):
    sums = np.random.default_rng(0).normal(size=1000).astype(dtype) * np.pi
    release = released(sums)
    point = np.round(release.astype(np.float64) / GAMMA) * GAMMA
    np.testing.assert_array_equal(point.astype(dtype), release)  # Of a float32, the nearest to the point.


def test_neighbours_on_the_grid_differ_by_at_most_the_sensitivity_that_the_noise_is_made_for():
    generator = np.random.default_rng(0)
    for _ in range(20):
        total = generator.normal(size=50) * 100
        example = generator.normal(size=50)
        example *= CLIP / np.linalg.norm(example)
        apart = [
            released(values, SecureNoiseSource(seed=0)).astype(np.float64)
            for values in (total, total + example)
        ]
        assert np.linalg.norm(apart[1] - apart[0]) <= CLIP + GAMMA * np.sqrt(50) + 1e-9


def test_the_noise_has_the_deviation_of_that_sensitivity():
    noise = released(np.zeros(500_000)).astype(np.float64)
    expected = SIGMA * (CLIP + GAMMA * np.sqrt(500_000))
    assert np.std(noise) == pytest.approx(expected, rel=5 * np.sqrt(0.5 / 500_000))
    assert secure_noise.grid_deviation(SIGMA, 500_000) * GAMMA == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("how", [{}, {"run_eagerly": True}, {"jit_compile": True}])
@pytest.mark.parametrize("make", [dp2.DPSGD, lambda *a, **k: dp2.DP2RMSprop(*a, delay=2, **k)])
def test_models_train_with_it(make, how):
    model = dp2.DP2Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(make(0.1, 1.0, 1.0, noise="secure"), loss="mse", **how)
    before = model.get_weights()
    model.fit(np.ones((40, 3)), np.ones(40), batch_size=10, epochs=2, verbose=0)
    assert model.ledger.steps == 8 and not np.array_equal(before[0], model.get_weights()[0])
    assert np.isfinite(model.get_weights()[0]).all()


def test_a_seed_repeats_it_and_none_does_not():
    weights = []
    for seed in (0, 0, None, None):
        model = dp2.DP2Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(dp2.DPSGD(0.1, 1.0, 1.0, noise="secure", noise_seed=seed), loss="mse")
        model.fit(np.zeros((10, 3)), np.zeros(10), batch_size=10, verbose=0)
        weights.append(model.get_weights()[0])
    assert np.array_equal(weights[0], weights[1]) and not np.array_equal(weights[2], weights[3])


def test_it_is_a_part_of_the_config():
    optimizer = dp2.DPSGD(0.1, 1.0, 1.0, noise="secure")
    again = dp2.DPSGD.from_config(optimizer.get_config())
    assert again.noise == "secure" and isinstance(again._noise_source, SecureNoiseSource)
    with pytest.raises(ValueError, match="`noise` must be one of 'fast', 'secure'. Received: noise='slow'"):
        dp2.DPSGD(0.1, 1.0, 1.0, noise="slow")


def test_it_says_what_it_needs(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install \"dp2_keras\[secure\]\""):
        SecureNoiseSource()
