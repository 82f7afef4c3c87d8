"""Poisson batches: the law that the accounting prices, and nothing but rows of the data.

Statistical tests state how often a right sampler would fail them.
"""

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse
import scipy.stats
import tensorflow as tf

import dp2_keras as dp2
from dp2_keras import sampling
from dp2_keras.rows import Rows, is_arrays
from dp2_keras.sampling import PoissonSampler, padded_size, poisson_batches

N, B, STEPS = 200, 20, 4000
Q = B / N


@pytest.fixture(scope="module")
def inclusions():
    """[STEPS, N] of 0 and 1: which rows each step drew."""
    sampler = PoissonSampler(N, B, seed=1)
    drawn = np.zeros([STEPS, N])
    for step in range(STEPS):
        drawn[step, sampler.rows(step)] = 1
    return drawn


def p_values_are_uniform(p_values):
    """A right sampler fails once in 10^6 times."""
    return scipy.stats.kstest(p_values, "uniform").pvalue > 1e-6


def test_every_row_is_drawn_with_probability_b_over_n(inclusions):
    # Two-sided binomial tests over all rows; with Bonferroni, a right sampler fails once in 10^6 times.
    tests = [scipy.stats.binomtest(int(k), STEPS, Q).pvalue for k in inclusions.sum(axis=0)]
    assert min(tests) > 1e-6 / N


def test_the_batch_size_is_binomial(inclusions):
    sizes = inclusions.sum(axis=1)
    cells = scipy.stats.binom(N, Q).ppf(np.linspace(0.1, 0.9, 9))
    edges = np.concatenate([[-1], np.unique(cells), [N]])
    expected = STEPS * np.diff(scipy.stats.binom(N, Q).cdf(edges))
    observed = np.histogram(sizes, bins=edges + 0.5)[0]
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-6  # Error rate 1e-6.


def test_steps_are_independent_of_each_other(inclusions):
    # Overlap of consecutive steps, given both, is hypergeometric; its mean is asymptotically normal.
    sizes, overlap = inclusions.sum(axis=1), (inclusions[1:] * inclusions[:-1]).sum(axis=1)
    law = scipy.stats.hypergeom(N, sizes[1:].astype(int), sizes[:-1].astype(int))
    z = (overlap - law.mean()).sum() / np.sqrt(law.var().sum())
    assert abs(z) < 4.9  # Error rate 1e-6.


def test_rows_are_independent_of_each_other(inclusions):
    # Correlations between 1000 pairs of rows: the largest of them, error rate 1e-6 by Bonferroni.
    pairs = np.random.default_rng(0).permuted(np.tile(np.arange(N), (1000, 1)), axis=1)[:, :2]
    centred = (inclusions - Q) / np.sqrt(Q * (1 - Q))
    z = [(centred[:, i] * centred[:, j]).sum() / np.sqrt(STEPS) for i, j in pairs]
    assert np.abs(z).max() < scipy.stats.norm.isf(0.5e-6 / 1000)


def test_a_draw_without_a_seed_follows_the_same_law():
    sampler = PoissonSampler(N, B)
    counts = np.bincount(np.concatenate([sampler.rows(0) for _ in range(STEPS)]), minlength=N)
    tests = [scipy.stats.binomtest(int(k), STEPS, Q).pvalue for k in counts]
    assert min(tests) > 1e-6 / N  # Error rate 1e-6.


@pytest.mark.parametrize("n, b", [(1, 1), (5, 5), (10**6, 64), (10**6, 50_000), (12_000, 300)])
def test_rows_are_distinct_sorted_and_in_range(n, b):
    for step in range(20):
        rows = PoissonSampler(n, b, seed=0).rows(step)
        assert rows.dtype == np.int64 and (np.diff(rows) > 0).all()
        assert not len(rows) or (rows[0] >= 0 and rows[-1] < n)
        assert n > b or len(rows) == n  # A rate of 1 takes everything.


def test_empty_draws_happen_as_often_as_they_should():
    sampler = PoissonSampler(10, 1, seed=0)
    empty = sum(len(sampler.rows(step)) == 0 for step in range(STEPS))
    assert scipy.stats.binomtest(empty, STEPS, 0.9**10).pvalue > 1e-6


def test_truncation_keeps_a_uniform_subset():
    sampler = PoissonSampler(50, 20, max_batch_size=15, seed=0)
    draws = [sampler.rows(step) for step in range(STEPS)]
    assert max(map(len, draws)) == 15
    counts = np.bincount(np.concatenate(draws), minlength=50)
    # Rows are exchangeable, so that each has the same rate; error rate about 1e-6.
    rate = counts.sum() / 50 / STEPS
    assert np.abs(counts - STEPS * rate).max() < 6 * np.sqrt(STEPS * rate * (1 - rate))
    whole = PoissonSampler(50, 20, seed=0)
    assert all(set(d) <= set(whole.rows(step)) for step, d in enumerate(draws))


# The key.


def test_a_seeded_draw_is_a_function_of_the_step():
    one, other = PoissonSampler(N, B, seed=3), PoissonSampler(N, B, seed=3)
    np.testing.assert_array_equal(one.rows(7), other.rows(7))
    np.testing.assert_array_equal(one.rows(7), one.rows(7))
    assert not np.array_equal(one.rows(7), one.rows(8))
    assert not np.array_equal(one.rows(7), PoissonSampler(N, B, seed=4).rows(7))


def test_a_secret_draw_is_never_repeated():
    sampler = PoissonSampler(N, B)
    draws = [tuple(sampler.rows(0)) for _ in range(50)] + [tuple(PoissonSampler(N, B).rows(0))]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_has_a_key_of_its_own(duplicate):
    sampler = PoissonSampler(N, B)
    assert not np.array_equal(duplicate(sampler).rows(0), sampler.rows(0))
    seeded = PoissonSampler(N, B, seed=1, max_batch_size=5)
    np.testing.assert_array_equal(duplicate(seeded).rows(0), seeded.rows(0))


def test_the_key_is_not_shown():
    sampler = PoissonSampler(N, B)
    shown = repr(sampler) + str(pickle.dumps(sampler))
    for word in sampler._key:
        assert str(word) not in shown and hex(word)[2:] not in shown


def test_noise_and_sampling_keys_of_one_seed_differ():
    assert not np.array_equal(
        sampling._fresh_key(5), dp2.DPSGD(1.0, 1.0, 1.0, noise_seed=5)._noise_source._key
    )


# Sizes to pad to.


@pytest.mark.parametrize("b", [1, 2, 7, 64, 100, 1024])
def test_padded_sizes_hold_the_batch_and_are_few(b):
    counts = np.unique(np.concatenate([np.arange(0, 8 * b + 9, 1 + b // 32), [b, b + 1]]))
    sizes = np.array([int(padded_size(k, b)) for k in counts])
    assert (sizes >= counts).all() and (np.diff(sizes) >= 0).all()
    assert set(sizes[counts <= b]) == {b}
    spread = int(np.ceil(np.sqrt(b)))
    assert set(sizes) <= {b, *(b + spread * 2**k for k in range(20))}


@pytest.mark.parametrize("b", [64, 256, 1024])
def test_padding_wastes_less_than_15_percent(b):
    n = 100 * b
    counts = np.arange(scipy.stats.binom(n, b / n).isf(1e-9) + 1).astype(int)
    weights = scipy.stats.binom(n, b / n).pmf(counts)
    padded = np.array([int(padded_size(k, b)) for k in counts])
    waste = (weights * padded).sum() / (weights * counts).sum() - 1
    assert waste < 0.10
    # Sizes that are met in a run of 100,000 steps: what XLA compiles for.
    met = {p for p, w in zip(padded, weights) if w > 1e-5}
    assert len(met) <= 5


def test_nothing_is_too_large_to_be_padded():
    assert int(padded_size(10**6, 64)) >= 10**6


# Batches of any kind of data.


def only(batches):
    (batch,) = batches
    return tf.nest.map_structure(lambda t: t.numpy(), batch)


X = np.arange(60.0).reshape(30, 2)
SPARSE = scipy.sparse.csr_matrix(np.where(X % 3 == 0, X, 0))


@pytest.mark.parametrize(
    "x",
    [
        X,
        X.astype(np.float32),
        tf.constant(X),
        SPARSE,
        SPARSE.tocoo(),
        tf.sparse.from_dense(SPARSE.toarray()),
        {"a": X, "b": X[:, 0]},
        (X, [X, X[:, :1]]),
    ],
    ids=str,
)
def test_batches_are_rows_of_the_data(x):
    rows = PoissonSampler(30, 10, seed=0).rows(0)
    batch = only(poisson_batches(x, np.arange(30), batch_size=10, steps=1, seed=0))
    np.testing.assert_array_equal(batch[1], rows)
    leaves = [x] if isinstance(x, tf.SparseTensor) or hasattr(x, "tocsr") else tf.nest.flatten(x)
    for taken, whole in zip(tf.nest.flatten(batch[0]), leaves):
        whole = tf.sparse.to_dense(whole).numpy() if isinstance(whole, tf.SparseTensor) else whole
        whole = whole.toarray() if hasattr(whole, "toarray") else np.asarray(whole)
        assert taken.dtype == np.float32
        np.testing.assert_array_equal(taken, whole[rows])


def test_a_source_that_is_not_in_memory_is_asked_for_rows_alone():
    asked = []

    class OnDisk:
        shape, dtype = (10**9, 3), np.float32

        def __getitem__(self, rows):
            asked.append(rows)
            return np.zeros((len(rows), 3), np.float32)

    batch = only(poisson_batches(OnDisk(), batch_size=8, steps=1, seed=0))
    assert batch[0].shape == (len(asked[-1]), 3)
    assert max(map(len, asked)) < 40 and (np.diff(asked[-1]) > 0).all()


def test_a_memory_map_and_an_hdf5_file(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X
        on_disk = only(poisson_batches(file["x"], batch_size=10, steps=1, seed=0))
    mapped = np.memmap(tmp_path / "x.bin", np.float64, "w+", shape=X.shape)
    mapped[:] = X
    np.testing.assert_array_equal(on_disk, only(poisson_batches(mapped, batch_size=10, steps=1, seed=0)))
    np.testing.assert_array_equal(on_disk[0], X[PoissonSampler(30, 10, seed=0).rows(0)])


def test_batches_end_or_do_not():
    assert len(list(poisson_batches(X, batch_size=3, steps=5))) == 5
    assert len(list(poisson_batches(X, batch_size=3).take(7))) == 7


def test_every_iteration_draws_anew_without_a_seed():
    batches = poisson_batches(X, batch_size=10, steps=3)
    first, second = ([tuple(x[:, 0].numpy()) for (x,) in batches] for _ in range(2))
    assert first != second


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(batch_size=0), "`batch_size` must be a positive integer. Received: batch_size=0"),
        (dict(batch_size=31), "at most `dataset_size`.* Received: batch_size=31, dataset_size=30"),
        (dict(batch_size=3, max_batch_size=0), "`max_batch_size` must be a positive integer"),
        (dict(batch_size=3, steps=0), "`steps` must be a positive integer"),
        (dict(batch_size=3, y=np.zeros(29)), r"one row per example. Received: arrays with \[30, 29\] rows"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        poisson_batches(X, **arguments)


def test_rows_split_like_keras():
    head, rest = Rows.of((X, np.arange(30), None)).split(20)
    assert len(head) == 20 and len(rest) == 2
    np.testing.assert_array_equal(rest[0], X[20:])
    (batch,) = head.batches(tf.data.Dataset.from_tensors(tf.constant([0, 19], tf.int64)))
    np.testing.assert_array_equal(batch[1], [0, 19])


def test_what_has_rows():
    assert is_arrays((X, None, [X])) and is_arrays(SPARSE)
    ragged = tf.ragged.constant([[1], [2, 3]])
    dataset = tf.data.Dataset.from_tensors(X)
    for other in (dataset, iter([X]), None, ragged, 3.0):
        assert not is_arrays(other)
