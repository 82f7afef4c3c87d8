"""MovieLens-100k: 100,000 ratings of 1,682 films by 943 users (Harper and Konstan 2015).

    u.data, one rating a line:   user <tab> item <tab> rating <tab> timestamp

with users and items numbered from 1 and ratings 1 to 5. GroupLens allows research with citation; the file
may not be passed on, nor used commercially, without permission; see
https://files.grouplens.org/datasets/movielens/ml-100k-README.txt
"""

from __future__ import annotations

import os
import zipfile

import numpy as np

from dp2_keras import _checks
from dp2_keras.data import download

_URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
_MD5 = "0e33842e24a9c977be4e0107933c0723"
_MEMBER = "ml-100k/u.data"


def movielens(path: str | os.PathLike | None = None, *, test_fraction: float = 0.2, seed: int = 0):
    """Loads the MovieLens-100k ratings, split at random into training and test ratings.

    An example is one rating, as in the paper: epsilon then protects a rating, not all ratings of a user.

    Args:
        path: the file `u.data`, or the directory that holds it. Defaults to a copy that is downloaded
            from GroupLens to `$DP2_KERAS_HOME`, by default `.dp2_keras` in the user's directory.
        test_fraction: share of the ratings, rounded, that are for testing. Defaults to 0.2.
        seed: integer of at least 0; the same seed gives the same split. Defaults to 0.

    Returns:
        `((users, items), ratings), ((users, items), ratings)`, training and test: users and items
        int32 [n] from 0, ratings float32 [n] from 1 to 5.

    Raises:
        ValueError: for a value out of range, or a file in another format.
        DownloadError: if the file cannot be downloaded.
        OSError: if the file cannot be read.

    Example:
    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> with open(os.path.join(directory, "u.data"), "w") as file:
    ...     _ = file.write("196\\t242\\t3\\t881250949\\n186\\t302\\t4\\t891717742\\n")
    >>> ((users, items), ratings), test = movielens(directory, test_fraction=0.5)
    >>> users.shape, items.dtype, ratings.dtype
    ((1,), dtype('int32'), dtype('float32'))

    References:
        Harper and Konstan, The MovieLens Datasets, ACM TiiS 5(4), 2015.
    """
    _checks.open_unit(test_fraction=test_fraction)
    _checks.non_negative_integer(seed=seed)
    rows = _rows(_file(path))
    order = np.random.default_rng(seed).permutation(len(rows))
    num_test = round(test_fraction * len(rows))
    return _columns(rows[order[num_test:]]), _columns(rows[order[:num_test]])


def _columns(rows):
    users, items = (rows[:, :2].T - 1).astype(np.int32)
    return (users, items), rows[:, 2].astype(np.float32)


def _file(path):
    if path is None:
        return _downloaded(os.path.join(download.home(), "movielens-100k"))
    path = os.fspath(path)
    return os.path.join(path, "u.data") if os.path.isdir(path) else path


def _downloaded(directory):
    """The file out of the archive, which is fetched once."""
    path = os.path.join(directory, "u.data")
    if not os.path.exists(path):
        archive = download.fetch(_URL, os.path.join(directory, "ml-100k.zip"), md5=_MD5)
        with zipfile.ZipFile(archive) as members, open(path + ".part", "wb") as file:
            file.write(members.read(_MEMBER))
        os.replace(path + ".part", path)
    return path


def _rows(path):
    """[n, 4] integers."""
    try:
        rows = np.loadtxt(path, dtype=np.int64, delimiter="\t", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} is no file of ratings: {error}") from error
    if rows.shape[1:] != (4,) or rows[:, :2].min() < 1 or not np.isin(rows[:, 2], np.arange(1, 6)).all():
        raise ValueError(f"{path} is no file of ratings: a line is user, item, rating and timestamp.")
    return rows
