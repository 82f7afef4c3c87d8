"""Stack Overflow: TFF's own reader and task as oracles, samples as asked for, a file for both stacks."""

import collections
import csv
import gzip
import json
import os
import pathlib
import runpy
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
import tensorflow as tf
from conftest import shared_path

from dp2_keras import data
from dp2_keras.data import stackoverflow_cache, tff_database

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "prepare_stackoverflow.py"
ALL = dict(num_words=None, num_tags=None, num_train=None, num_test=None)
WORDS = {"sort": 9, "a": 8, "list": 7, "in": 5, "python": 4}
TAGS = {"python": 5, "java": 3, "list": 2}


class Clients:
    """Client data of TFF's shape, without TFF."""

    def __init__(self, sentences):
        self._sentences = sentences
        self.client_ids = list(sentences)

    def create_tf_dataset_for_client(self, client):
        fields = zip(*self._sentences[client])
        return tf.data.Dataset.from_tensor_slices(dict(zip(("tokens", "title", "tags"), map(list, fields))))


SENTENCES = {
    "2": [("sort a sort list", "sorting", "list|python"), ("nothing known", "here", "java")],
    "1": [("a", "a list in python", "cobol|java|python"), ("sort", "it", "cobol")],
}
CLIENTS = Clients(SENTENCES)
MANY = Clients({f"{i}": [(f"client{i}", f"title {j}", "java") for j in range(6)] for i in range(10)})
MANY_WORDS = {f"client{i}": 1 for i in range(10)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "stackoverflow.npz"


def prepare(path, clients=CLIENTS, words=WORDS, **options):
    given = dict(client_data=(clients, clients), word_counts=words, tag_counts=TAGS)
    return data.prepare_stackoverflow(path, **{**ALL, **given, **options})


def oracle(words=WORDS, tags=TAGS):
    """Rows and labels of all sentences with a known tag, in plain Python: a multiset."""
    rows = []
    for tokens, title, listed in (sentence for client in SENTENCES.values() for sentence in client):
        known = [tag for tag in listed.split("|") if tag in tags]
        if known:
            found = collections.Counter(f"{tokens} {title}".split())
            rows.append((tuple(found[word] for word in words), list(tags).index(known[0]), frozenset(known)))
    return sorted(rows, key=str)


# Preparing and reading.


def test_rows_and_labels_are_what_plain_python_finds(path):
    prepare(path)
    first, multi = [
        data.stackoverflow(path, features="counts", labels=labels) for labels in ("first", "multi")
    ]
    for (x, y), (_, tags) in zip(first, multi):
        assert x.format == "csr" and x.dtype == tags.dtype == np.float32 and y.dtype == np.int32
        names = np.array(list(TAGS))
        known = [frozenset(names[row.astype(bool)]) for row in tags.toarray()]
        found = zip(map(tuple, x.toarray().astype(int).tolist()), y.tolist(), known)
        assert sorted(found, key=str) == oracle()


def test_binary_and_frequencies_follow_from_counts(path):
    prepare(path)
    for split in (0, 1):
        counts, binary, frequencies = [
            data.stackoverflow(path, features=features)[split][0].toarray()
            for features in ("counts", "binary", "frequencies")
        ]
        np.testing.assert_array_equal(binary, counts > 0)
        sums = counts.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(frequencies, counts / np.maximum(sums, 1), rtol=1e-6)
        assert (sums == 0).any(), "a sentence without known words is kept, and is zero"


def test_the_first_known_tag_in_the_questions_order_is_the_class(path):
    prepare(path)
    (x, y), _ = data.stackoverflow(path)
    by_words = {tuple(row): tag for row, tag in zip(x.toarray().astype(int).tolist(), y)}
    assert by_words[1, 1, 1, 0, 0] == 2  # list|python, although python is more frequent.
    assert by_words[0, 1, 1, 1, 1] == 1  # cobol|java|python, of which cobol is not known.


def test_the_most_frequent_words_and_tags_are_kept(path):
    metadata = prepare(path, num_words=2, num_tags=1)
    described = data.stackoverflow_description(path)
    assert described["words"] == ["sort", "a"] and described["tags"] == ["python"]
    assert (metadata["num_words"], metadata["num_tags"], metadata["num_train"]) == (2, 1, 2)
    (x, y), _ = data.stackoverflow(path)
    assert x.shape == (2, 2) and y.tolist() == [0, 0]


def test_the_file_says_where_it_comes_from_and_what_was_left_out(path):
    metadata = prepare(path, seed=4)
    described = data.stackoverflow_description(path)
    assert {key: described[key] for key in metadata} == metadata
    assert described["source"] == "given client data" and described["seed"] == 4
    assert described["seen"]["train"] == dict(clients=2, sentences=4, without_known_tag=1)


def test_the_file_is_read_without_tff_and_tensorflow_and_without_pickle(path):
    prepare(path)
    code = (
        "import sys; from dp2_keras import data; data.stackoverflow(sys.argv[1]);"
        "assert not {'tensorflow', 'tensorflow_federated', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    with np.load(path, allow_pickle=False) as file:
        assert all(file[name].dtype.kind in "iU" for name in file.files)
        assert json.loads(file["metadata"].item())["format"] == stackoverflow_cache.FORMAT


# Sampling.


def clients_of(path, split=0):
    """How many sentences of each client are in a split."""
    x, _ = data.stackoverflow(path)[split]
    return x.toarray().sum(axis=0).astype(int)


def test_as_many_sentences_as_asked_for_from_whole_clients(path):
    metadata = prepare(path, MANY, MANY_WORDS, num_train=15, num_test=60)
    assert clients_of(path).sum() == 15 and np.count_nonzero(clients_of(path)) == 3
    assert metadata["seen"]["train"]["clients"] == 3
    assert clients_of(path, 1).tolist() == [6] * 10


def test_a_bound_per_client_spreads_the_sample(path):
    prepare(path, MANY, MANY_WORDS, num_train=15, max_per_client=2)
    counts = clients_of(path)
    assert counts.sum() == 15 and counts.max() == 2 and np.count_nonzero(counts) >= 8


def test_a_seed_repeats_a_sample_and_another_does_not(path):
    samples = []
    for seed in (0, 0, 1):
        prepare(path, MANY, MANY_WORDS, num_train=18, seed=seed)
        samples.append(path.read_bytes())
    assert samples[0] == samples[1] != samples[2]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(num_train=9),
            "`num_train` must be at most 3, the number of sentences .* Received: num_train=9",
        ),
        (dict(num_test=4), "`num_test` must be at most 3, the number of .* Received: num_test=4"),
        (dict(num_words=6), "`num_words` must be at most 5, the number of words .* Received: num_words=6"),
        (dict(num_tags=4), "`num_tags` must be at most 3, the number of tags .* Received: num_tags=4"),
        (dict(num_tags=0), "`num_tags` must be a positive integer. Received: num_tags=0"),
        (dict(max_per_client=0), "`max_per_client` must be a positive integer. Received: max_per_client=0"),
        (dict(seed=-1), "`seed` must be an integer of at least 0. Received: seed=-1"),
    ],
)
def test_more_than_there_is_raises_with_both_numbers(path, change, message):
    with pytest.raises(ValueError, match=message):
        prepare(path, **change)
    assert not path.exists()


def test_rejects_unknown_features_and_labels(path):
    prepare(path)
    with pytest.raises(ValueError, match="`features` must be one of .* Received: features='tfidf'"):
        data.stackoverflow(path, features="tfidf")
    with pytest.raises(ValueError, match="`labels` must be one of 'first', 'multi'. Received: labels='last'"):
        data.stackoverflow(path, labels="last")


def test_rejects_a_file_in_another_format(path):
    np.savez(path, x=np.zeros(3))
    with pytest.raises(ValueError, match="stackoverflow.npz is no file of .*prepare_stackoverflow"):
        data.stackoverflow(path)


def test_without_tff_it_says_what_to_do(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_federated", None)
    with pytest.raises(ImportError, match="needs TensorFlow Federated unless .* classic stack"):
        data.prepare_stackoverflow(path, client_data=(CLIENTS, CLIENTS))


# The substitute for TFF's database.

ROWS = [
    ("train", "Sort a List?", "Which way? See http://a.b/c. Caf\u00e9!", "python list"),
    ("train", "C# & VB.NET", "", "c# .net"),
    ("dev", "Why won't it work", "", "java"),
    ("test", "sort  a list ?", "A twin.", "java"),
    ("test", "How to sort", "Fast.", "java list"),
]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("split", "title", "body", "tags"), *ROWS])
    return path


@pytest.fixture
def substitute(questions, tmp_path):
    data.build_tff_database(questions, tmp_path / "tff", num_clients=3)
    return tmp_path / "tff"


def parsed(proto):
    example = tf.train.Example.FromString(proto)
    texts = {name: feature.bytes_list.value for name, feature in example.features.feature.items()}
    assert list(example.features.feature["score"].int64_list.value) == [0]
    return {name: value[0].decode() for name, value in texts.items() if name != "score"}


def test_the_database_holds_one_example_per_sentence(substitute):
    with sqlite3.connect(substitute / "stackoverflow.sqlite") as database:
        rows = database.execute("SELECT split_name, client_id, serialized_example_proto FROM examples")
        examples = [(split, client, parsed(proto)) for split, client, proto in rows]
    texts = [(split, e["title"], e["tokens"], e["tags"]) for split, _, e in examples]
    assert texts == [
        ("train", "sort a list ?", "which way ?", "python|list"),
        ("train", "sort a list ?", "see <URL>", "python|list"),
        ("train", "sort a list ?", "caf !", "python|list"),
        ("train", "c # & vb . net", "", "c#|.net"),
        ("heldout", "why won't it work", "", "java"),
        ("test", "how to sort", "fast .", "java|list"),
    ]
    assert len({client for _, client, e in examples if e["title"] == "sort a list ?"}) == 1
    assert {(e["type"], e["creation_date"]) for _, _, e in examples} == {
        ("question", "1970-01-01 00:00:00 UTC")
    }


def test_the_database_counts_the_examples_of_each_client(substitute):
    with sqlite3.connect(substitute / "stackoverflow.sqlite") as database:
        counted = database.execute(
            "SELECT client_id, split_name, count(*) FROM examples GROUP BY client_id, split_name"
        ).fetchall()
        stated = database.execute(
            "SELECT client_id, split_name, num_examples FROM client_metadata"
        ).fetchall()
        assert sorted(counted) == sorted(stated)


def test_a_question_whose_title_came_before_is_left_out_whatever_its_split(questions, tmp_path):
    built = data.build_tff_database(questions, tmp_path / "tff")
    assert (built["rows"], built["duplicates"], built["questions"]) == (5, 1, 4)
    assert built["examples"] == {"train": 4, "heldout": 1, "test": 1}


def test_counts_are_numbers_of_training_clients(questions, tmp_path):
    data.build_tff_database(questions, tmp_path / "one", num_clients=1)
    words, tags = data.read_tff_counts(tmp_path / "one")
    assert set(words.values()) == set(tags.values()) == {1}  # All questions are one client's.
    assert list(words)[:4] == ["?", "a", "list", "sort"]  # In three examples each.
    assert list(tags) == ["list", "python", ".net", "c#"] and "java" not in tags
    assert {"how", "to", "work"}.isdisjoint(words)


def test_a_database_that_is_there_is_never_overwritten(substitute, questions):
    with pytest.raises(FileExistsError, match="which may be TFF's own: .*stackoverflow.sqlite"):
        data.build_tff_database(questions, substitute)


@pytest.mark.parametrize(
    "header, rows, message",
    [
        ("split,title,tags", ["train,a,b"], "lacks the columns body"),
        ("split,title,body,tags", ["eval,a,,b"], "`split` must be one of 'train', 'dev', 'test'. Received"),
        ("split,title,body,tags", ["train,a,,b", "test,c,,b"], "cannot read the database. .* none in dev"),
    ],
)
def test_rejects_a_csv_that_tff_could_not_read_and_leaves_no_database(tmp_path, header, rows, message):
    path = tmp_path / "bad.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    with pytest.raises(ValueError, match=message):
        data.build_tff_database(path, tmp_path / "tff")
    assert not os.path.exists(tmp_path / "tff" / "stackoverflow.sqlite")


def test_a_substitute_needs_its_own_counts(substitute, path):
    with pytest.raises(ValueError, match="must be given with a substitute .* `data.read_tff_counts"):
        data.prepare_stackoverflow(path, cache_dir=substitute)


# With TFF.


@pytest.fixture(scope="module")
def tff():
    reason = "TensorFlow Federated runs on the classic stack alone"
    return pytest.importorskip("tensorflow_federated", reason=reason)


@pytest.fixture
def no_network(tff, monkeypatch):
    def refuse(*arguments, **options):
        raise urllib.error.URLError("no network in tests")

    from keras.src.utils import data_utils

    monkeypatch.setattr(data_utils, "urlopen", refuse)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def tff_task(tff, clients, words, tags):
    """The rows of TFF's own tag prediction task: frequencies and tags."""
    from tensorflow_federated.python.simulation.baselines.stackoverflow import tag_prediction_preprocessing

    to_ids = tag_prediction_preprocessing.build_to_ids_fn(words, tags)
    rows = []
    for client in clients.client_ids:
        for example in clients.create_tf_dataset_for_client(client):
            x, y = to_ids(example)
            if y.numpy().any():
                rows.append(np.concatenate([x.numpy(), y.numpy()]))
    return in_order(rows)


def in_order(rows):
    return np.array(sorted(np.round(rows, 5).tolist()))


def our_rows(path, split):
    x, y = data.stackoverflow(path, features="frequencies", labels="multi")[split]
    return in_order(np.concatenate([x.toarray(), y.toarray()], axis=1))


def test_frequencies_and_tags_are_those_of_tffs_own_task(tff, path):
    stackoverflow = tff.simulation.datasets.stackoverflow
    clients = stackoverflow.get_synthetic()
    words, tags = stackoverflow.get_synthetic_word_counts(), stackoverflow.get_synthetic_tag_counts()
    counts = dict(word_counts=words, tag_counts=tags)
    data.prepare_stackoverflow(path, client_data=(clients, clients), **{**ALL, "num_tags": 11}, **counts)
    expected = tff_task(tff, clients, list(words), list(tags)[:11])
    np.testing.assert_allclose(our_rows(path, 0), expected, atol=2e-5)
    assert len(expected) == 6


def test_tffs_reader_takes_the_substitute_for_its_own(tff, substitute, path, no_network):
    words, tags = data.read_tff_counts(substitute)
    options = dict(cache_dir=substitute, word_counts=words, tag_counts=tags)
    metadata = data.prepare_stackoverflow(path, **ALL, **options)
    assert metadata["source"] == "substitute made from questions.csv.gz"
    assert (metadata["num_train"], metadata["num_test"]) == (4, 1)
    train, _, _ = tff.simulation.datasets.stackoverflow.load_data(cache_dir=str(substitute))
    expected = tff_task(tff, train, list(words), list(tags))
    np.testing.assert_allclose(our_rows(path, 0), expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["word", "tag"])
def test_tffs_own_loader_deletes_the_counts_of_a_substitute(tff, substitute, no_network, kind):
    """The reason why `prepare_stackoverflow` asks for them."""
    path = tff_database.counts_file(kind, str(substitute))
    assert os.path.exists(path)
    with pytest.raises(Exception, match="URL fetch failure"):
        getattr(tff.simulation.datasets.stackoverflow, f"load_{kind}_counts")(cache_dir=str(substitute))
    assert not os.path.exists(path)


def test_out_of_reach_it_says_where_to_put_tffs_files(tff, tmp_path, path, no_network):
    place = tmp_path / "datasets" / "stackoverflow.word_count.tar.bz2"
    with pytest.raises(
        data.DownloadError, match=f"Could not get {place.name} from https.* put it at {place}"
    ):
        data.prepare_stackoverflow(path, cache_dir=tmp_path)
    place = tmp_path / "stackoverflow.sqlite"
    with pytest.raises(
        data.DownloadError, match=f"Could not get {place.name} from https.* put it at {place}"
    ):
        data.prepare_stackoverflow(path, cache_dir=tmp_path, **ALL, word_counts=WORDS, tag_counts=TAGS)


def test_the_example_goes_from_csv_to_file(tff, questions, tmp_path, path, capsys, no_network):
    example = runpy.run_path(str(EXAMPLE))
    sizes = ["--num-words", "10", "--num-tags", "3"]
    example["main"]([str(path), "--csv", str(questions), "--cache-dir", str(tmp_path / "tff"), *sizes])
    assert "train: x (4, 10)" in capsys.readouterr().out


def test_the_examples_sizes_are_the_papers_without_a_csv():
    example = runpy.run_path(str(EXAMPLE))
    arguments = example["parse"](["out.npz"])
    assert (arguments.num_train, arguments.num_test) == (246_092, 61_719)
    arguments = example["parse"](["out.npz", "--csv", "a.csv", "--cache-dir", "tff"])
    assert (arguments.num_train, arguments.num_test) == (None, None)


@pytest.mark.slow
def test_real_questions_through_tffs_reader(tff, tmp_path, path, no_network):
    questions = shared_path("data", "stackoverflow_text.csv.gz")
    built = data.build_tff_database(questions, tmp_path)
    assert built["rows"] == 56_075 and built["duplicates"] + built["questions"] == 56_075
    words, tags = data.read_tff_counts(tmp_path)
    counts = dict(word_counts=words, tag_counts=tags)
    metadata = data.prepare_stackoverflow(path, cache_dir=tmp_path, num_train=None, num_test=None, **counts)
    for split, (x, y) in zip(("train", "test"), data.stackoverflow(path)):
        seen = metadata["seen"][split]
        assert seen["sentences"] == built["examples"][split]
        assert x.shape == (seen["sentences"] - seen["without_known_tag"], 10_000) and y.max() < 500
    with pytest.raises(ValueError, match="`num_train` must be at most 66921, .* Received: num_train=246092"):
        data.prepare_stackoverflow(path, cache_dir=tmp_path, **counts)
