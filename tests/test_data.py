"""Synthetic reviews: what a caller relies on, and the shape that the equation gives."""

import numpy as np
import pytest

from dp2_keras import data

COMMON = slice(0, 100)
CONTENT = slice(100, None)


@pytest.fixture(scope="module")
def reviews():
    return data.synthetic_reviews(4000, 1000, vocabulary_size=2000, seed=3)


def test_shapes_and_types(reviews):
    for (x, y), count in zip(reviews, (4000, 1000)):
        assert x.shape == (count, 2000) and y.shape == (count,)
        assert x.dtype == y.dtype == np.float32
        assert set(np.unique(x)) == set(np.unique(y)) == {0.0, 1.0}


def test_labels_are_balanced_and_shuffled(reviews):
    for _, y in reviews:
        assert y.mean() == 0.5
        assert 0.4 < np.mean(y[1:] == y[:-1]) < 0.6


def test_a_seed_repeats_and_another_does_not(reviews):
    again = data.synthetic_reviews(4000, 1000, vocabulary_size=2000, seed=3)
    other = data.synthetic_reviews(4000, 1000, vocabulary_size=2000, seed=4)
    np.testing.assert_array_equal(reviews[1][0], again[1][0])
    assert not np.array_equal(reviews[1][0], other[1][0])


def test_lengths_vary_and_no_review_is_empty(reviews):
    lengths = reviews[0][0].sum(axis=1)
    assert lengths.min() >= 1 and lengths.std() > 10


def test_common_words_fill_reviews_and_content_words_are_rare(reviews):
    x = reviews[0][0]
    frequencies = x.mean(axis=0)
    assert frequencies[COMMON].sum() > 4 * frequencies[CONTENT].sum()
    assert frequencies[COMMON].min() > 5 * frequencies[CONTENT].max()
    assert frequencies[CONTENT].max() < 0.05


def test_frequencies_fall_as_zipf_says(reviews):
    # Content words are too rare to occur twice in a review, so x.mean() has their law.
    frequencies = reviews[0][0].mean(axis=0)
    first, last = frequencies[100:200].mean(), frequencies[1900:].mean()
    expected = np.mean(1 / (4 + np.arange(101, 201))) / np.mean(1 / (4 + np.arange(1901, 2001)))
    np.testing.assert_allclose(first / last, expected, rtol=0.15)


def test_content_words_say_more_than_common_ones(reviews):
    x, y = reviews[0]
    log_odds = np.abs(np.log(x[y == 1].mean(axis=0) + 1e-3) - np.log(x[y == 0].mean(axis=0) + 1e-3))
    assert log_odds[CONTENT].mean() > 3 * log_odds[COMMON].mean()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_train=0), "`num_train` must be a positive integer. Received: num_train=0"),
        (dict(num_test=1.5), "`num_test` must be a positive integer. Received: num_test=1.5"),
        (dict(vocabulary_size=100), "`vocabulary_size` must be more than 100. Received: vocabulary_size=100"),
    ],
)
def test_rejects_impossible_sizes(change, message):
    with pytest.raises(ValueError, match=message):
        data.synthetic_reviews(**change)
