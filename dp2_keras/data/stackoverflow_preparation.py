"""Stack Overflow sentences from TFF's client data to one prepared file.

    words of a sentence = tokens and title, split at spaces     (as in TFF's tag prediction task)
    tags of a sentence  = the tags of its question, split at "|"

    1. visit the clients of a split in an order drawn by the seed
    2. keep of each client the sentences that have at least one of the `num_tags` tags,
       at most `max_per_client` of them, drawn by the seed
    3. stop when there are enough sentences, and draw the wanted number from those seen

Training sentences are drawn from TFF's train split and test sentences from its test split, which is later
in time and has users in common with the other. The paper says that its sentences were sampled at random, and
not how. Without `max_per_client` this is a sample of whole clients, a few hundred sentences each.

The words and tags are the most frequent ones of TFF's training users, so they are chosen on private data, and
epsilon does not cover that. An example is a sentence: epsilon protects a sentence, not all that a user wrote.
"""

from __future__ import annotations

import collections
import os
import sqlite3
from collections.abc import Mapping

import numpy as np

from dp2_keras import _checks
from dp2_keras.data import download, stackoverflow_cache, tff_database

_BATCH = 1024


def prepare_stackoverflow(
    cache_file: str | os.PathLike,
    *,
    cache_dir: str | os.PathLike | None = None,
    num_words: int | None = 10_000,
    num_tags: int | None = 500,
    num_train: int | None = 246_092,
    num_test: int | None = 61_719,
    max_per_client: int | None = None,
    seed: int = 0,
    client_data: tuple | None = None,
    word_counts: Mapping[str, int] | None = None,
    tag_counts: Mapping[str, int] | None = None,
) -> dict:
    """Draws sentences from TFF's Stack Overflow data and writes the file that `stackoverflow` reads.

    It needs TensorFlow Federated, which runs on the classic stack alone; the file can be read on either. The
    defaults are the paper's. For None in place of a number, all that there are.

    TFF downloads its data where it is not in `cache_dir`: 169 million sentences. It does not check that
    database, so a download that was cut must be deleted by hand.

    Args:
        cache_file: the file to write.
        cache_dir: where TFF keeps its files. Defaults to its own choice, `~/.tff` and `~/.keras`. With a
            substitute of `build_tff_database` in it, pass the counts too: see `read_tff_counts`.
        num_words: how many words, the most frequent ones.
        num_tags: how many tags, the most frequent ones.
        num_train: how many training sentences.
        num_test: how many test sentences.
        max_per_client: the most sentences of one client in a split. Defaults to None, any number.
        seed: integer of at least 0; the same seed and data give the same file. Defaults to 0.
        client_data: a pair of `tff.simulation.datasets.ClientData`, training and test, instead of what
            `tff.simulation.datasets.stackoverflow.load_data` gives.
        word_counts: a dict from word to count, most frequent first, instead of what
            `tff.simulation.datasets.stackoverflow.load_word_counts` gives.
        tag_counts: the same for tags and `load_tag_counts`.

    Returns:
        The metadata that was written: what was asked for, and how many sentences and clients were seen.

    Raises:
        ValueError: for a value out of range, a number that is larger than what there is, or a substitute
            without counts of its own.
        ImportError: if TFF is needed and not installed.
        DownloadError: if TFF cannot get or read its files.

    Example:
        With TFF, `prepare_stackoverflow("stackoverflow.npz")` is all. Without it, anything of the same shape
        takes the place of its client data:

    >>> import tempfile, types
    >>> import tensorflow as tf
    >>> sentences = dict(tokens=["sort a list"], title=["how to sort"], tags=["python|list"])
    >>> clients = types.SimpleNamespace(
    ...     client_ids=["1"],
    ...     create_tf_dataset_for_client=lambda client: tf.data.Dataset.from_tensor_slices(sentences),
    ... )
    >>> path = os.path.join(tempfile.mkdtemp(), "stackoverflow.npz")
    >>> everything = dict(num_words=None, num_tags=None, num_train=None, num_test=None)
    >>> counts = dict(word_counts={"sort": 2, "list": 1}, tag_counts={"python": 1})
    >>> metadata = prepare_stackoverflow(path, client_data=(clients, clients), **counts, **everything)
    >>> metadata["num_train"], metadata["seen"]["train"]["clients"]
    (1, 1)
    >>> (x_train, y_train), test = stackoverflow_cache.stackoverflow(path, features="counts")
    >>> x_train.toarray()
    array([[2., 1.]], dtype=float32)
    """
    asked = dict(num_words=num_words, num_tags=num_tags, num_train=num_train, num_test=num_test)
    for name, value in {**asked, "max_per_client": max_per_client}.items():
        if value is not None:
            _checks.positive_integer(**{name: value})
    _checks.non_negative_integer(seed=seed)
    source = _Source(cache_dir, client_data, word_counts, tag_counts)
    words = _most_frequent(source.counts("word"), "words", num_words=num_words)
    tags = _most_frequent(source.counts("tag"), "tags", num_tags=num_tags)
    encode = _Encoder(words, tags)
    sentences, seen = {}, {}
    for split, (name, data) in enumerate(zip(("train", "test"), source.client_data())):
        draw = _Draw(encode, np.random.default_rng([seed, split]), max_per_client)
        sentences[name], seen[name] = draw(data, **{f"num_{name}": asked[f"num_{name}"]})
    metadata = dict(source=source.name, seed=seed, max_per_client=max_per_client, seen=seen)
    metadata.update(num_words=len(words), num_tags=len(tags))
    metadata.update({f"num_{name}": len(rows) for name, rows in sentences.items()})
    stackoverflow_cache.write(cache_file, sentences, words, tags, metadata)
    return metadata


class _Source:
    """What was given, and TFF's loaders for what was not."""

    def __init__(self, cache_dir, client_data, word_counts, tag_counts):
        self._cache_dir = None if cache_dir is None else os.fspath(cache_dir)
        self._client_data, self._counts = client_data, {"word": word_counts, "tag": tag_counts}
        given = client_data is not None
        substitute = None if given else tff_database.description(self._cache_dir)
        if substitute and (word_counts is None or tag_counts is None):
            raise ValueError(
                "`word_counts` and `tag_counts` must be given with a substitute for TFF's database, because "
                "TFF would delete or replace the substitute's own. Pass what "
                f"`data.read_tff_counts(cache_dir)` returns. Received: cache_dir={self._cache_dir!r}"
            )
        self.name = "given client data" if given else substitute or "TFF's stackoverflow"

    def client_data(self):
        if self._client_data is not None:
            return self._client_data
        try:
            train, _, test = _tff().load_data(cache_dir=self._cache_dir)
        except (OSError, sqlite3.Error) as error:
            url = "https://storage.googleapis.com/tff-datasets-public/stackoverflow.sqlite.lzma"
            path = tff_database.database_file(self._cache_dir)
            reason = f"{error} (if a cut download is there, delete it; by hand, unpack it)"
            raise download.failure(url, path, reason) from error
        return train, test

    def counts(self, kind):
        if self._counts[kind] is not None:
            return self._counts[kind]
        load = getattr(_tff(), f"load_{kind}_counts")
        try:
            return load(cache_dir=self._cache_dir)
        except Exception as error:  # Keras raises a bare Exception where it cannot download.
            path = tff_database.counts_file(kind, self._cache_dir)
            url = f"https://storage.googleapis.com/tff-datasets-public/{os.path.basename(path)}"
            raise download.failure(url, path, error) from error


def _tff():
    try:
        import tensorflow_federated as tff
    except ImportError as error:
        raise ImportError(
            "`prepare_stackoverflow` needs TensorFlow Federated unless `client_data`, `word_counts` and "
            "`tag_counts` are given. Prepare the file on the classic stack of BUILD.md; both stacks read it."
        ) from error
    return tff.simulation.datasets.stackoverflow


def _most_frequent(counts, kind, **wanted):
    ((name, number),) = wanted.items()
    if number is not None and number > len(counts):
        _checks.fail(f"at most {len(counts)}, the number of {kind} there are, or None for all", **wanted)
    return list(counts)[:number]


class _Encoder:
    """Words and tags of a sentence as numbers."""

    def __init__(self, words, tags):
        self._words = {word.encode(): number for number, word in enumerate(words)}
        self._tags = {tag.encode(): number for number, tag in enumerate(tags)}

    def __call__(self, tokens, title, tags):
        """A dict from word to count, and the known tags in their order."""
        known = [self._words[word] for word in (tokens + b" " + title).split() if word in self._words]
        tags = dict.fromkeys(self._tags[tag] for tag in tags.split(b"|") if tag in self._tags)
        return dict(collections.Counter(known)), list(tags)


class _Draw:
    """A random sample of the sentences of one split."""

    def __init__(self, encode, rng, max_per_client):
        self._encode, self._rng, self._max_per_client = encode, rng, max_per_client

    def __call__(self, client_data, **wanted):
        """The sentences, and how many were seen to find them."""
        ((name, number),) = wanted.items()
        pool, seen = [], collections.Counter(clients=0, sentences=0, without_known_tag=0)
        for client in self._rng.permutation(sorted(client_data.client_ids)):
            pool.extend(self._of_client(client_data, str(client), seen))
            if number is not None and len(pool) >= number:
                break
        if number is not None and len(pool) < number:
            rule = f"at most {len(pool)}, the number of sentences there are with a known tag, or None for all"
            _checks.fail(rule, **wanted)
        return self._sample(pool, number), dict(seen)

    def _of_client(self, client_data, client, seen):
        sentences = [self._encode(*fields) for fields in _sentences(client_data, client)]
        kept = [sentence for sentence in sentences if sentence[1]]
        seen.update(clients=1, sentences=len(sentences), without_known_tag=len(sentences) - len(kept))
        return kept if self._max_per_client is None else self._sample(kept, self._max_per_client)

    def _sample(self, sentences, number):
        return [sentences[row] for row in self._rng.permutation(len(sentences))[:number]]


def _sentences(client_data, client):
    """Tokens, title and tags of a client's sentences, as bytes."""
    for batch in client_data.create_tf_dataset_for_client(client).batch(_BATCH).as_numpy_iterator():
        yield from zip(batch["tokens"], batch["title"], batch["tags"])
