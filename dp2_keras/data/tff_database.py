"""A substitute for TFF's Stack Overflow database, made from a CSV of questions.

TFF's reader takes any database in its place that has its format:

    <cache_dir>/stackoverflow.sqlite
        examples          split_name, client_id, serialized_example_proto (a tf.train.Example with
                          creation_date, score, tags, title, tokens, type; tags joined by "|")
        client_metadata   client_id, split_name, num_examples
        source            one row that says that this is a substitute; TFF does not look at it
    <cache_dir>/datasets/stackoverflow.word_count.tar.bz2    lines "word count", most frequent first
    <cache_dir>/datasets/stackoverflow.tag_count.tar.bz2     a JSON object from tag to count

TFF checks no hash of the database, but it does of the counts: `load_word_counts` and `load_tag_counts`
take another file for a damaged one, download TFF's own over it, and if that fails delete it. So the counts of
a substitute are read by `read_tff_counts`, never by TFF.

From a row of the CSV (columns split, title, body, tags; others are ignored) to examples:

    text      lower case, HTML unescaped, ASCII alone, URLs as <URL>, punctuation apart but for ' and -
    examples  one per sentence of the body, each with the title and tags; a question without a body is
              one example without tokens
    dates     none in the CSV: 1970-01-01; scores: 0; type: question
    splits    train -> train, dev -> heldout, test -> test
    twins     a question whose title, as tokens, came before in the file is left out, whatever its split,
              so that no title is in two splits
    clients   no users in the CSV: client = SHA-256(title as tokens) mod num_clients, so that a question is
              one client's whole, and clients are random groups of questions, not people
    counts    number of training clients with the word (in tokens or title) or tag, as in TFF; ties by the
              number of examples, then by spelling
"""

from __future__ import annotations

import collections
import csv
import gzip
import hashlib
import html
import io
import json
import os
import re
import sqlite3
import tarfile

from dp2_keras import _checks

_SPLITS = {"train": "train", "dev": "heldout", "test": "test"}
_URL = re.compile(r"(?:https?://|www\.)\S+")
_TOKEN = re.compile(r"<URL>|[a-z0-9'-]+|[^\sa-z0-9'-]")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_SCHEMA = """
    CREATE TABLE examples (
        split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);
    CREATE TABLE client_metadata (
        client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);
    CREATE TABLE source (description TEXT NOT NULL);
    CREATE INDEX examples_of_client ON examples (client_id, split_name);
"""


def build_tff_database(
    csv_file: str | os.PathLike, cache_dir: str | os.PathLike, *, num_clients: int = 500
) -> dict:
    """Puts a substitute for TFF's Stack Overflow data where TFF looks for its own.

    What becomes of a row is at the top of this file. It is for tests and for places that cannot reach TFF's
    bucket: figures on it are not figures on the data of the paper.

    Args:
        csv_file: a CSV with the columns split, title, body and tags (separated by spaces), perhaps gzipped.
        cache_dir: a directory for this alone, to be passed as `cache_dir` to TFF; made if need be.
        num_clients: over how many clients the questions are spread. Defaults to 500.

    Returns:
        Counts: rows, duplicates, questions, and examples by split.

    Raises:
        FileExistsError: if there is a database already.
        ValueError: for a value out of range, a column that is missing, a split of another name, or a split
            without questions.

    Example:
    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> with open(os.path.join(directory, "questions.csv"), "w") as file:
    ...     _ = file.write("split,title,body,tags\\ntrain,Sort a list?,Which way? Help.,python list\\n")
    ...     _ = file.write("dev,Read a file?,,c\\ntest,Why null?,,java\\n")
    >>> build_tff_database(os.path.join(directory, "questions.csv"), directory)["examples"]
    {'train': 2, 'heldout': 1, 'test': 1}
    """
    _checks.positive_integer(num_clients=num_clients)
    path = database_file(os.fspath(cache_dir))
    if os.path.exists(path):
        raise FileExistsError(f"There is a database already, which may be TFF's own: {path}")
    os.makedirs(os.path.join(cache_dir, "datasets"), exist_ok=True)
    questions = _Questions(csv_file, num_clients)
    examples, counts = collections.Counter(), _Counts()
    with _Database(path, f"substitute made from {os.path.basename(csv_file)}") as database:
        for split, client, title, tags, sentences in questions:
            for tokens in sentences:
                database.add(split, client, title, tags, tokens)
                if split == "train":
                    counts.add(client, f"{tokens} {title}".split(), tags)
            examples[split] += len(sentences)
        _check_splits(examples, csv_file)
    counts.write(cache_dir)
    return {**questions.seen, "examples": dict(examples)}


def _check_splits(examples, csv_file):
    """TFF's reader looks at the first client of each split."""
    missing = [name for name, split in _SPLITS.items() if not examples[split]]
    if missing:
        raise ValueError(
            f"{csv_file} must have a question in each of the splits {', '.join(_SPLITS)}, or TFF cannot read "
            f"the database. Received: none in {', '.join(missing)}"
        )


def read_tff_counts(cache_dir: str | os.PathLike) -> tuple[dict, dict]:
    """Reads the counts of a substitute, which TFF's own loaders would refuse and delete.

    Args:
        cache_dir: the directory that `build_tff_database` filled.

    Returns:
        Two dicts, from word and from tag to count, most frequent first: `word_counts` and `tag_counts` of
        `prepare_stackoverflow`.

    Raises:
        OSError: if they cannot be read.

    Example:
    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> with open(os.path.join(directory, "questions.csv"), "w") as file:
    ...     _ = file.write("split,title,body,tags\\ntrain,Sort a list?,,python list\\n")
    ...     _ = file.write("dev,Read a file?,,c\\ntest,Why null?,,java\\n")
    >>> _ = build_tff_database(os.path.join(directory, "questions.csv"), directory)
    >>> read_tff_counts(directory)
    ({'?': 1, 'a': 1, 'list': 1, 'sort': 1}, {'list': 1, 'python': 1})
    """
    words = [line.split() for line in _unpacked("word", cache_dir).splitlines()]
    tags = json.loads(_unpacked("tag", cache_dir))
    return {word: int(count) for word, count in words}, tags


def database_file(cache_dir: str | None) -> str:
    """Where TFF looks for its database."""
    directory = os.path.join(os.path.expanduser("~"), ".tff") if cache_dir is None else cache_dir
    return os.path.join(directory, "stackoverflow.sqlite")


def counts_file(kind: str, cache_dir: str | None) -> str:
    """Where TFF looks for the counts of "word" or "tag"."""
    directory = os.path.join(os.path.expanduser("~"), ".keras") if cache_dir is None else cache_dir
    return os.path.join(directory, "datasets", f"stackoverflow.{kind}_count.tar.bz2")


def description(cache_dir: str | None) -> str | None:
    """What a substitute says of itself; None for TFF's own database, or where there is none."""
    path = database_file(cache_dir)
    if not os.path.exists(path):
        return None
    connection = sqlite3.connect(path)
    try:
        return connection.execute("SELECT description FROM source").fetchone()[0]
    except sqlite3.Error:  # No such table, or no database at all.
        return None
    finally:
        connection.close()


class _Questions:
    """Split, client, title, tags and sentences of each question of a CSV, without twins."""

    def __init__(self, csv_file, num_clients):
        self._csv_file, self._num_clients = os.fspath(csv_file), num_clients
        self.seen = dict(rows=0, duplicates=0, questions=0)

    def __iter__(self):
        titles = set()
        for row in self._rows():
            title = tokens(row["title"])
            self.seen["rows"] += 1
            self.seen["duplicates" if title in titles else "questions"] += 1
            if title not in titles:
                titles.add(title)
                tags, sentences = row["tags"].split(), _sentences(row["body"])
                yield self._split(row), self._client(title), title, tags, sentences

    def _rows(self):
        opened = gzip.open if self._csv_file.endswith(".gz") else open
        with opened(self._csv_file, "rt", encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = {"split", "title", "body", "tags"} - set(reader.fieldnames or [])
            if missing:
                raise ValueError(f"{self._csv_file} lacks the columns {', '.join(sorted(missing))}.")
            yield from reader

    def _split(self, row):
        _checks.one_of(tuple(_SPLITS), split=row["split"])
        return _SPLITS[row["split"]]

    def _client(self, title):
        return str(int.from_bytes(hashlib.sha256(title.encode()).digest(), "big") % self._num_clients)


def tokens(text: str) -> str:
    """Text in TFF's manner: tokens separated by spaces.

    Example:
    >>> tokens("Why won't C# &amp; VB.NET load http://a.b/c?")
    "why won't c # & vb . net load <URL>"
    """
    parts = _URL.sub("\0", html.unescape(text)).lower().replace("\0", " <URL> ")
    return " ".join(_TOKEN.findall(parts.encode("ascii", "ignore").decode()))


def _sentences(body):
    """At least one: a question without a body is its title alone."""
    sentences = [tokens(sentence) for sentence in _SENTENCE_END.split(body)]
    return [sentence for sentence in sentences if sentence] or [""]


class _Database:
    """Writes the tables of TFF's format; the file appears when all is written."""

    def __init__(self, path, source):
        self._path, self._examples = path, collections.Counter()
        self._part = path + ".part"
        if os.path.exists(self._part):
            os.remove(self._part)
        self._connection = sqlite3.connect(self._part)
        self._connection.executescript(_SCHEMA)
        self._connection.execute("INSERT INTO source VALUES (?)", [source])

    def add(self, split, client, title, tags, sentence):
        row = split, client, _serialized(title, tags, sentence)
        self._connection.execute("INSERT INTO examples VALUES (?, ?, ?)", row)
        self._examples[client, split] += 1

    def __enter__(self):
        return self

    def __exit__(self, kind, *exception):
        rows = [(*key, count) for key, count in self._examples.items()]
        self._connection.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", rows)
        self._connection.commit()
        self._connection.close()
        if kind is None:
            os.replace(self._part, self._path)


def _serialized(title, tags, sentence):
    import tensorflow as tf

    texts = dict(creation_date="1970-01-01 00:00:00 UTC", tags="|".join(tags), title=title)
    texts.update(tokens=sentence, type="question")
    feature = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
        for name, text in texts.items()
    }
    feature["score"] = tf.train.Feature(int64_list=tf.train.Int64List(value=[0]))
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


class _Counts:
    """How many clients, and then how many examples, have a word or a tag."""

    def __init__(self):
        self._clients = {"word": collections.defaultdict(set), "tag": collections.defaultdict(set)}
        self._examples = collections.Counter()

    def add(self, client, words, tags):
        for kind, names in (("word", words), ("tag", tags)):
            for name in set(names):
                self._clients[kind][name].add(client)
                self._examples[kind, name] += 1

    def write(self, cache_dir):
        words = "".join(f"{word} {count}\n" for word, count in self._ranked("word"))
        _pack("word", cache_dir, words)
        _pack("tag", cache_dir, json.dumps(dict(self._ranked("tag"))))

    def _ranked(self, kind):
        counted = [(name, len(clients)) for name, clients in self._clients[kind].items()]
        return sorted(counted, key=lambda pair: (-pair[1], -self._examples[kind, pair[0]], pair[0]))


def _pack(kind, cache_dir, text):
    member = tarfile.TarInfo(f"stackoverflow.{kind}_count")
    member.size = len(text.encode())
    with tarfile.open(counts_file(kind, os.fspath(cache_dir)), "w:bz2") as archive:
        archive.addfile(member, io.BytesIO(text.encode()))


def _unpacked(kind, cache_dir):
    with tarfile.open(counts_file(kind, os.fspath(cache_dir))) as archive:
        return archive.extractfile(f"stackoverflow.{kind}_count").read().decode()
