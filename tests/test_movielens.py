"""MovieLens: ids from zero, a split that loses no rating, and a download that is unpacked once."""

import hashlib
import zipfile

import numpy as np
import pytest
from conftest import shared_path

from dp2_keras import data
from dp2_keras.data import movielens_ratings

LINES = [(user, item, 1 + (user + item) % 5, 880_000_000 + user) for user in (1, 2, 9) for item in (1, 4, 30)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "u.data"
    path.write_text("".join("\t".join(map(str, line)) + "\n" for line in LINES))
    return path


def triples(part):
    """Users, items and ratings as a set, with ids as in the file."""
    (users, items), ratings = part
    return {(u + 1, i + 1, r) for u, i, r in zip(users.tolist(), items.tolist(), ratings.tolist())}


def test_training_and_test_ratings_together_are_the_file(path):
    train, test = data.movielens(path, test_fraction=1 / 3)
    assert triples(train) | triples(test) == {line[:3] for line in LINES}
    assert len(triples(train)) == 6 and len(triples(test)) == 3


def test_ids_are_int32_from_zero_and_ratings_float32(path):
    parts = data.movielens(path)
    for (users, items), ratings in parts:
        assert users.dtype == items.dtype == np.int32 and ratings.dtype == np.float32
    assert min(users.min() for (users, _), _ in parts) == min(items.min() for (_, items), _ in parts) == 0


def test_a_directory_that_holds_the_file_will_do(path):
    assert triples(data.movielens(path.parent)[0]) == triples(data.movielens(path)[0])


def test_a_seed_repeats_a_split_and_another_does_not(path):
    first, again, other = [data.movielens(path, test_fraction=0.5, seed=seed)[1] for seed in (1, 1, 2)]
    assert triples(first) == triples(again) != triples(other)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(test_fraction=1),
            "`test_fraction` must be greater than 0 and less than 1. Received: test_frac",
        ),
        (dict(seed=-1), "`seed` must be an integer of at least 0. Received: seed=-1"),
    ],
)
def test_rejects_impossible_arguments(path, change, message):
    with pytest.raises(ValueError, match=message):
        data.movielens(path, **change)


@pytest.mark.parametrize("text", ["1\t1\t3\n", "0\t1\t3\t8\n", "1\t1\t6\t8\n", "1,1,3,8\n", "user\titem\n"])
def test_rejects_a_file_in_another_format(tmp_path, text):
    path = tmp_path / "other.data"
    path.write_text(text)
    with pytest.raises(ValueError, match="other.data is no file of ratings"):
        data.movielens(path)


def test_without_a_path_the_archive_is_fetched_checked_and_unpacked_once(path, tmp_path, monkeypatch):
    archive = tmp_path / "there.zip"
    with zipfile.ZipFile(archive, "w") as members:
        members.write(path, "ml-100k/u.data")
        members.writestr("ml-100k/u.user", "not wanted")
    monkeypatch.setenv("DP2_KERAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(movielens_ratings, "_URL", archive.as_uri())
    monkeypatch.setattr(movielens_ratings, "_MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    first = data.movielens()
    archive.unlink()
    assert triples(data.movielens()[0]) == triples(first[0]) == triples(data.movielens(path)[0])
    kept = sorted(file.name for file in (tmp_path / "home" / "movielens-100k").iterdir())
    assert kept == ["ml-100k.zip", "u.data"]


def test_out_of_reach_it_says_where_to_put_the_archive(tmp_path, monkeypatch):
    monkeypatch.setenv("DP2_KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(movielens_ratings, "_URL", (tmp_path / "nowhere.zip").as_uri())
    place = tmp_path / "movielens-100k" / "ml-100k.zip"
    with pytest.raises(data.DownloadError, match=f"get the file by hand and put it at {place}"):
        data.movielens()


@pytest.fixture(scope="module")
def real_path():
    return shared_path("data", "movielens-100k")


def test_the_real_ratings_have_their_known_figures(real_path):
    train, test = data.movielens(real_path)
    assert len(train[1]) == 80_000 and len(test[1]) == 20_000
    ratings = np.concatenate([train[1], test[1]])
    np.testing.assert_array_equal(np.bincount(ratings.astype(int)), [0, 6110, 11370, 27145, 34174, 21201])
    assert max(users.max() for (users, _), _ in (train, test)) == 942
    assert max(items.max() for (_, items), _ in (train, test)) == 1681
    assert np.var(ratings) == pytest.approx(1.27, abs=0.005)
