"""IMDB: 25,000 + 25,000 film reviews as bags of words, labelled by sentiment (Maas et al. 2011).

A review is a sequence of word numbers, as `keras.datasets.imdb` has them:

    0 = padding, 1 = start of a review, 2 = a word outside the vocabulary, 3 = unused,
    r + 3 = the word of rank r in the training reviews

Numbers 0, 1 and 2 are no words, and are left out; so are numbers of `num_words` and above. Column j of x
is word number j, so that columns 0 to 3 are empty.

A local file is an npz without pickled objects, with the arrays `{train,test}_{indptr,indices,labels}`:
row i is `indices[indptr[i]:indptr[i + 1]]`, its label 0 or 1.
"""

from __future__ import annotations

import os

import numpy as np

from dp2_keras import _checks
from dp2_keras.data import bags, download

_FIRST_WORD = 3
_ARRAYS = ("indptr", "indices", "labels")


def imdb(
    path: str | os.PathLike | None = None,
    *,
    features: str = "binary",
    num_words: int = 10_000,
    idf: np.ndarray | None = None,
):
    """Loads the IMDB reviews, one sparse row per review.

    The vocabulary, the most frequent words of the training reviews, is chosen on private data, and epsilon
    does not cover that. Nor does it cover the weights of `features="tfidf"`, which are fitted on the training
    reviews unless `idf` gives public ones.

    Args:
        path: a local file in the format at the top of this file. Defaults to Keras's own copy, which
            `keras.datasets.imdb.load_data` downloads if need be.
        features: "binary" (1 where a word is present), "counts", "frequencies" (counts divided by the number
            of words in the review), or "tfidf" (counts times 1 + log((1 + n) / (1 + df)), in rows of l2
            norm 1). Defaults to "binary".
        num_words: number of columns: words are those with numbers below it. A file that was made with
            fewer has empty columns. Defaults to 10,000.
        idf: [num_words] public weights for "tfidf", instead of those of the training reviews.

    Returns:
        `(x_train, y_train), (x_test, y_test)`: x SciPy CSR float32 [n, num_words], y float32 [n] of
        zeros and ones.

    Raises:
        ValueError: for a value out of range, or a file in another format.
        OSError: if the file cannot be read, or not be downloaded: `DownloadError` says where to put it.

    Example:
    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "imdb.npz")
    >>> part = dict(indptr=[0, 4, 5], indices=[1, 4, 4, 7, 2], labels=[1, 0])
    >>> np.savez(path, **{f"{s}_{k}": np.array(v) for s in ("train", "test") for k, v in part.items()})
    >>> (x, y), _ = imdb(path, features="counts", num_words=8)
    >>> x.toarray()[:, 4:], y
    (array([[2., 0., 0., 1.],
            [0., 0., 0., 0.]], dtype=float32), array([1., 0.], dtype=float32))

    References:
        Maas et al., Learning Word Vectors for Sentiment Analysis, ACL 2011.
    """
    _checks.one_of((*bags.FEATURES, "tfidf"), features=features)
    _checks.positive_integer(num_words=num_words)
    _check_idf(idf, features, num_words)
    parts = _from_keras(num_words) if path is None else _from_file(path)
    (train, y_train), (test, y_test) = [
        (bags.count(indptr, indices, num_words, first=_FIRST_WORD), labels.astype(np.float32))
        for indptr, indices, labels in parts
    ]
    if features == "tfidf" and idf is None:
        idf = bags.inverse_document_frequencies(train)
    return (_featurized(train, features, idf), y_train), (_featurized(test, features, idf), y_test)


def _featurized(counts, features, idf):
    return bags.tfidf(counts, idf) if features == "tfidf" else bags.FEATURES[features](counts)


def _check_idf(idf, features, num_words):
    if idf is None:
        return
    if features != "tfidf":
        _checks.fail("'tfidf' where `idf` is given", features=features)
    if np.shape(idf) != (num_words,) or not np.all(np.isfinite(idf)):
        raise ValueError(
            f"`idf` must be {num_words} finite numbers, one per word. Received: shape {np.shape(idf)}"
        )


def _from_file(path):
    with np.load(path, allow_pickle=False) as file:
        missing = [f"{s}_{a}" for s in ("train", "test") for a in _ARRAYS if f"{s}_{a}" not in file.files]
        if missing:
            raise ValueError(
                f"{path} is no file of reviews: it lacks {', '.join(missing)}. Keras's own imdb.npz is read "
                "without `path`."
            )
        parts = [tuple(file[f"{split}_{array}"] for array in _ARRAYS) for split in ("train", "test")]
    for indptr, indices, labels in parts:
        if len(indptr) != len(labels) + 1 or indptr[0] != 0 or indptr[-1] != len(indices):
            raise ValueError(f"{path} is damaged: its rows, words and labels do not fit together.")
    return parts


def _from_keras(num_words):
    return [_joined(*part) for part in download.from_keras("imdb", num_words=num_words)]


def _joined(sequences, labels):
    """Lists of numbers as one array, and where each begins."""
    indptr = np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])])
    indices = np.fromiter((number for sequence in sequences for number in sequence), np.int32, indptr[-1])
    return indptr, indices, np.asarray(labels)
