"""Stack Overflow tag prediction: sentences as bags of words, read from a prepared file.

The file is an npz without pickled objects:

    {train,test}_indptr, _indices, _counts   word `indices[k]` is `counts[k]` times in sentence i,
                                             for k from indptr[i] to indptr[i + 1]
    {train,test}_tag_indptr, _tag_indices    the tags of sentence i, in the order of the question
    words, tags                              what the numbers mean, most frequent first
    metadata                                 JSON: where the sentences come from and how they were drawn

Every sentence has at least one of the tags. `prepare_stackoverflow` writes the file, and needs TFF;
reading it needs neither TFF nor TensorFlow.
"""

from __future__ import annotations

import json
import os

import numpy as np
import scipy.sparse

from dp2_keras import _checks
from dp2_keras.data import bags

FORMAT = "dp2_keras stackoverflow, version 1"

_SPLITS = ("train", "test")


def stackoverflow(path: str | os.PathLike, *, features: str = "binary", labels: str = "first"):
    """Loads prepared Stack Overflow sentences: which tag has the question that a sentence belongs to?

    The paper makes the task a 500-class problem and does not say which of a question's tags is the class.
    Here it is the first, in the question's own order, that is among the tags of the file.

    Args:
        path: a file that `prepare_stackoverflow` wrote.
        features: "binary" (1 where a word is present), "counts", or "frequencies" (counts divided by the
            number of known words in the sentence, as in TFF's own task). Defaults to "binary".
        labels: "first", one class per sentence, or "multi", all its tags as zeros and ones.

    Returns:
        `(x_train, y_train), (x_test, y_test)`: x SciPy CSR float32 [n, words]; y int32 [n], or for "multi"
        SciPy CSR float32 [n, tags], of which Keras needs `y.toarray()`.

    Raises:
        ValueError: for a value out of range, or a file in another format.
        OSError: if the file cannot be read.

    Example:
    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "stackoverflow.npz")
    >>> sentences = [({0: 2, 2: 1}, [1, 0]), ({1: 1}, [0])]  # Words with their counts, and tags.
    >>> write(path, {"train": sentences, "test": []}, ["how", "to", "sort"], ["java", "c"], {"seed": 0})
    >>> (x, y), _ = stackoverflow(path, features="counts")
    >>> x.toarray(), y
    (array([[2., 0., 1.],
            [0., 1., 0.]], dtype=float32), array([1, 0], dtype=int32))
    """
    _checks.one_of(tuple(bags.FEATURES), features=features)
    _checks.one_of(("first", "multi"), labels=labels)
    label = _first if labels == "first" else _multi
    with np.load(path, allow_pickle=False) as file:
        _check_format(file, path)
        num_words, num_tags = len(file["words"]), len(file["tags"])
        train, test = [
            (bags.FEATURES[features](_words(file, split, num_words)), label(file, split, num_tags))
            for split in _SPLITS
        ]
    return train, test


def stackoverflow_description(path: str | os.PathLike) -> dict:
    """Says what a prepared file holds.

    Args:
        path: a file that `prepare_stackoverflow` wrote.

    Returns:
        The metadata, and under "words" and "tags" the lists of what the columns mean.

    Raises:
        ValueError: if the file is in another format.
        OSError: if the file cannot be read.

    Example:
    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "stackoverflow.npz")
    >>> write(path, {"train": [], "test": []}, ["how", "to", "sort"], ["java", "c"], {"seed": 0})
    >>> stackoverflow_description(path)["tags"]
    ['java', 'c']
    """
    with np.load(path, allow_pickle=False) as file:
        metadata = _check_format(file, path)
        return {**metadata, "words": file["words"].tolist(), "tags": file["tags"].tolist()}


def write(path: str | os.PathLike, sentences: dict, words: list, tags: list, metadata: dict) -> None:
    """Writes a prepared file, whole or not at all.

    Args:
        path: where to.
        sentences: for "train" and "test" a list of pairs: a dict from word number to count, and a list of
            tag numbers.
        words: what the word numbers mean.
        tags: what the tag numbers mean.
        metadata: anything that JSON can hold.
    """
    arrays = {"words": np.array(words, np.str_), "tags": np.array(tags, np.str_)}
    arrays["metadata"] = np.array(json.dumps({"format": FORMAT, **metadata}))
    for split in _SPLITS:
        bag, labels = [words for words, _ in sentences[split]], [tags for _, tags in sentences[split]]
        arrays[f"{split}_indptr"], arrays[f"{split}_indices"] = _joined(bag)
        arrays[f"{split}_counts"] = _joined([words.values() for words in bag])[1]
        arrays[f"{split}_tag_indptr"], arrays[f"{split}_tag_indices"] = _joined(labels)
    part = os.fspath(path) + ".part"
    with open(part, "wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(part, path)


def _joined(rows):
    """Collections of numbers as one array, after where each begins."""
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    return indptr, np.fromiter((number for row in rows for number in row), np.int32, indptr[-1])


def _check_format(file, path):
    """The metadata of an open file."""
    metadata = json.loads(file["metadata"].item()) if "metadata" in file.files else {}
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is no file of {FORMAT!r}: write one with `data.prepare_stackoverflow`.")
    return metadata


def _words(file, split, num_words):
    values, indptr = file[f"{split}_counts"].astype(np.float32), file[f"{split}_indptr"]
    shape = (len(indptr) - 1, num_words)
    matrix = scipy.sparse.csr_matrix((values, file[f"{split}_indices"], indptr), shape=shape)
    matrix.sort_indices()
    return matrix


def _first(file, split, num_tags):
    return file[f"{split}_tag_indices"][file[f"{split}_tag_indptr"][:-1]].astype(np.int32)


def _multi(file, split, num_tags):
    return bags.count(file[f"{split}_tag_indptr"], file[f"{split}_tag_indices"], num_tags)
