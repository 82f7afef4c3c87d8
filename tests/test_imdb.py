"""IMDB against a bag of words that is counted review by review, in plain Python."""

import collections
import http.client
import math

import keras
import numpy as np
import pytest
from conftest import shared_path

from dp2_keras import data

NUM_WORDS = 12
REVIEWS = {  # With padding (0), start (1), unknown words (2), and words that `num_words` leaves out.
    "train": ([[1, 4, 4, 11, 2, 12], [1], [0, 0, 1, 3, 5, 4, 5, 5], [1, 30, 2]], [1, 0, 0, 1]),
    "test": ([[1, 11, 11, 6], [1, 4]], [0, 1]),
}


def save(path, reviews):
    arrays = {}
    for split, (rows, labels) in reviews.items():
        arrays[f"{split}_indptr"] = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
        arrays[f"{split}_indices"] = np.concatenate(rows).astype(np.uint16)
        arrays[f"{split}_labels"] = np.array(labels, np.uint8)
    np.savez(path, **arrays)
    return path


@pytest.fixture
def path(tmp_path):
    return save(tmp_path / "imdb.npz", REVIEWS)


def oracle(rows, features, idf=None):
    """Dense rows, word by word."""
    x = np.zeros((len(rows), NUM_WORDS))
    for i, row in enumerate(rows):
        for word, count in collections.Counter(row).items():
            if 3 <= word < NUM_WORDS:
                x[i, word] = dict(binary=1, tfidf=count * (idf[word] if idf else 1)).get(features, count)
        norm = {"tfidf": math.sqrt(sum(value**2 for value in x[i])), "frequencies": sum(x[i])}.get(features)
        x[i] /= norm or 1
    return x


def train_idf():
    rows = REVIEWS["train"][0]
    found = [sum(word in row for row in rows) for word in range(NUM_WORDS)]
    return [1 + math.log((1 + len(rows)) / (1 + count)) for count in found]


@pytest.mark.parametrize("features", ["binary", "counts", "frequencies", "tfidf"])
def test_rows_are_the_bags_of_words_that_plain_python_counts(path, features):
    for split, (x, y) in zip(REVIEWS, data.imdb(path, features=features, num_words=NUM_WORDS)):
        rows, labels = REVIEWS[split]
        assert x.format == "csr" and x.dtype == y.dtype == np.float32 and x.has_canonical_format
        np.testing.assert_allclose(x.toarray(), oracle(rows, features, train_idf()), rtol=1e-6)
        np.testing.assert_array_equal(y, labels)


def test_binary_features_and_10000_words_are_the_default(path):
    (x, _), _ = data.imdb(path)
    assert x.shape == (4, 10_000) and set(x.data) == {1.0}
    assert x[3].indices.tolist() == [30]


def test_padding_start_and_unknown_words_are_left_out(path):
    for x, _ in data.imdb(path, features="counts"):
        assert x[:, :3].nnz == 0


def test_a_public_idf_takes_the_place_of_the_fitted_one(path):
    public = np.linspace(1.0, 3.0, NUM_WORDS)
    _, (x, _) = data.imdb(path, features="tfidf", num_words=NUM_WORDS, idf=public)
    expected = oracle(REVIEWS["test"][0], "tfidf", public.tolist())
    np.testing.assert_allclose(x.toarray(), expected, rtol=1e-6)


def test_without_a_path_the_reviews_are_those_of_keras(path, monkeypatch):
    def load_data(num_words):
        cut = lambda row: [word if word < num_words else 2 for word in row]  # noqa: E731
        # Arrays of lists, as Keras has them.
        parts = [([cut(row) for row in rows], labels) for rows, labels in REVIEWS.values()]
        return [(np.array(rows, dtype=object), np.array(labels)) for rows, labels in parts]

    monkeypatch.setattr(keras.datasets.imdb, "load_data", load_data)
    for ours, file in zip(data.imdb(num_words=NUM_WORDS), data.imdb(path, num_words=NUM_WORDS)):
        np.testing.assert_array_equal(ours[0].toarray(), file[0].toarray())
        np.testing.assert_array_equal(ours[1], file[1])


@pytest.mark.parametrize("error", [Exception, ConnectionResetError, http.client.IncompleteRead])
def test_a_failed_download_says_where_to_put_the_file(error, monkeypatch):
    def load_data(num_words):
        raise error(b"no route to host")

    monkeypatch.setattr(keras.datasets.imdb, "load_data", load_data)
    said = "^Could not get imdb.npz from keras.datasets.imdb: .* by hand and put it in `datasets` of Keras's"
    with pytest.raises(data.DownloadError, match=said) as caught:
        data.imdb()
    assert str(caught.value.__cause__) in str(caught.value)


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_what_is_no_failed_download_is_not_called_one(error, monkeypatch):
    def load_data(num_words):
        raise error("another matter")

    monkeypatch.setattr(keras.datasets.imdb, "load_data", load_data)
    with pytest.raises(error, match="another matter"):
        data.imdb()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(features="words"),
            "`features` must be one of 'binary', .*, 'tfidf'. Received: features='words'",
        ),
        (dict(num_words=0), "`num_words` must be a positive integer. Received: num_words=0"),
        (dict(idf=np.ones(10_000)), "`features` must be 'tfidf' where `idf` is given. Received: features='b"),
        (dict(features="tfidf", idf=np.ones(3)), r"`idf` must be 10000 finite .* Received: shape \(3,\)"),
    ],
)
def test_rejects_impossible_arguments(path, change, message):
    with pytest.raises(ValueError, match=message):
        data.imdb(path, **change)


def test_rejects_a_file_in_another_format(tmp_path):
    np.savez(tmp_path / "other.npz", x_train=np.zeros(3))
    with pytest.raises(ValueError, match="lacks train_indptr.* Keras's own imdb.npz is read without `path`"):
        data.imdb(tmp_path / "other.npz")


def test_rejects_a_file_whose_arrays_do_not_fit(path, tmp_path):
    arrays = dict(np.load(path))
    arrays["test_indices"] = arrays["test_indices"][:-1]
    np.savez(tmp_path / "cut.npz", **arrays)
    with pytest.raises(ValueError, match="cut.npz is damaged"):
        data.imdb(tmp_path / "cut.npz")


@pytest.fixture(scope="module")
def real_path():
    return shared_path("data", "imdb.npz")


def test_the_real_reviews_have_their_known_size(real_path):
    with np.load(real_path) as file:
        for split, (x, y) in zip(("train", "test"), data.imdb(real_path)):
            assert x.shape == (25_000, 10_000) and y.sum() == 12_500 and x.data.min() == x.data.max() == 1.0
            rows = np.repeat(np.arange(25_000), np.diff(file[f"{split}_indptr"]))
            words = file[f"{split}_indices"]
            pairs = np.sort((rows * 10_000 + words)[words > 2])
            assert x.nnz == 1 + np.count_nonzero(np.diff(pairs))


def test_a_few_real_rows_are_what_numpy_finds_in_the_file(real_path):
    (x, _), _ = data.imdb(real_path, features="counts")
    with np.load(real_path) as file:
        indptr, indices = file["train_indptr"], file["train_indices"]
    for row in (0, 7, 12_345, 24_999):
        words, counts = np.unique(indices[indptr[row] : indptr[row + 1]], return_counts=True)
        np.testing.assert_array_equal(x[row].indices, words[words > 2])
        np.testing.assert_array_equal(x[row].data, counts[words > 2])
