"""Downloads that show progress, go on where they were cut, and are checked.

    <path>.part   what has come so far; the next call asks for the rest (HTTP Range)
    <path>        appears once the file is whole and its hash is right

A server that ignores Range sends everything again, and the download begins anew.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import posixpath
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

from dp2_keras import _checks

_CHUNK = 1 << 18
_HOME = "DP2_KERAS_HOME"


class DownloadError(OSError):
    """A file could not be had; the message says from where, why, and where to put it by hand."""


def fetch(
    url: str,
    path: str | os.PathLike,
    *,
    sha256: str | None = None,
    md5: str | None = None,
    timeout: float = 30.0,
    progress: bool = True,
) -> str:
    """Downloads a file, unless it is there already; either way its hash is checked.

    Args:
        url: its address.
        path: where it is to be: a file, or a directory that exists, in which it has the address's name.
        sha256: its hash. One of `sha256` and `md5` must be given.
        md5: its hash, for files that are published with no better one.
        timeout: seconds to wait for the server, each time. Defaults to 30.
        progress: whether to show progress on stderr. Defaults to True.

    Returns:
        The path of the file.

    Raises:
        DownloadError: if the file cannot be had or has another hash. What came of a download that was cut
            stays, and the next call goes on from there.
        ValueError: if no hash is given, or two.

    Example:
    >>> import pathlib, tempfile
    >>> there, here = [pathlib.Path(tempfile.mkdtemp()) / "words.txt" for _ in range(2)]
    >>> _ = there.write_bytes(b"a word or two")
    >>> digest = hashlib.sha256(b"a word or two").hexdigest()
    >>> path = fetch(there.as_uri(), here, sha256=digest, progress=False)
    >>> here.read_bytes()
    b'a word or two'
    """
    if (sha256 is None) == (md5 is None):
        raise ValueError(f"One of `sha256` and `md5` must be given. Received: sha256={sha256!r}, md5={md5!r}")
    _checks.positive(timeout=timeout)
    path, algorithm, digest = _file(url, path), "sha256" if sha256 else "md5", sha256 or md5
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        _complete(url, path, algorithm, digest, timeout, progress)
    elif _hash(path, algorithm) != digest:
        raise failure(url, path, f"the file that is there has another {algorithm} hash than {digest}")
    return path


def failure(url: str, path: str, reason) -> DownloadError:
    """The error for a file that could not be had."""
    return _failure(os.path.basename(path), url, reason, f"at {path}")


def _failure(name, url, reason, place):
    return DownloadError(
        f"Could not get {name} from {url}: {reason}. To go on without this download, get "
        f"the file by hand and put it {place}"
    )


def from_keras(name: str, **arguments):
    """One of `keras.datasets`, which Keras downloads if need be, without saying where a file may be put.

    Args:
        name: the module's, "imdb" or "mnist".
        **arguments: of its `load_data`.

    Returns:
        What `load_data` does.

    Raises:
        DownloadError: if the file cannot be had.
    """
    from dp2_keras._keras import keras

    try:
        return getattr(keras.datasets, name).load_data(**arguments)
    except Exception as error:
        # Keras has no narrower one for a download that failed; one that was cut short is one of the others.
        if type(error) is not Exception and not isinstance(error, (OSError, http.client.HTTPException)):
            raise
        place = "in `datasets` of Keras's directory, which is ~/.keras unless it was told otherwise"
        raise _failure(f"{name}.npz", f"keras.datasets.{name}", error, place) from error


def home() -> str:
    """Where downloaded data sets are kept: `$DP2_KERAS_HOME`, or `.dp2_keras` in the user's directory."""
    return os.environ.get(_HOME) or os.path.join(os.path.expanduser("~"), ".dp2_keras")


def _file(url, path):
    path = os.fspath(path)
    if not os.path.isdir(path):
        return path
    return os.path.join(path, posixpath.basename(urllib.parse.urlsplit(url).path))


def _complete(url, path, algorithm, digest, timeout, progress):
    part = path + ".part"
    try:
        _receive(url, part, timeout, _Progress(os.path.basename(path), progress))
    except (OSError, http.client.HTTPException) as error:
        raise failure(url, path, error) from error
    if _hash(part, algorithm) != digest:
        os.remove(part)  # It would be wrong at its end however often it were resumed.
        raise failure(url, path, f"what came has another {algorithm} hash than {digest}")
    os.replace(part, path)


def _receive(url, part, timeout, progress):
    """Appends to a partial file what it lacks."""
    size = os.path.getsize(part) if os.path.exists(part) else 0
    try:
        response = urllib.request.urlopen(_request(url, size), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not size:
            raise
        return  # Nothing comes after the bytes that we have: the hash tells if they are right.
    with response:
        size = _offset(response, size)
        length = response.headers.get("Content-Length")
        total = size + int(length) if length else None
        with open(part, "ab" if size else "wb") as file, progress:
            size = _copy(response, file, size, total, progress)
    if total is not None and size < total:
        raise OSError(f"the connection ended after {size:,} of {total:,} bytes; call again to go on")


def _copy(response, file, size, total, progress):
    """The size of the file in the end."""
    while chunk := response.read(_CHUNK):
        file.write(chunk)
        size += len(chunk)
        progress.show(size, total)
    return size


def _request(url, size):
    return urllib.request.Request(url, headers={"Range": f"bytes={size}-"} if size else {})


def _offset(response, size):
    """Where the bytes of a response belong: after those we have if it is a partial one, else at the start."""
    if response.status != 206:
        return 0
    content = response.headers.get("Content-Range", "")
    if not content.startswith(f"bytes {size}-"):
        raise OSError(f"the server sent another part than was asked for ({content!r})")
    return size


def _hash(path, algorithm):
    digest = hashlib.new(algorithm)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class _Progress:
    """One line on stderr that is written over a few times a second."""

    def __init__(self, name, shown):
        self._name, self._shown, self._time, self._line = name, shown, 0.0, ""

    def show(self, size, total):
        share = f" of {total / 1e6:,.1f} MB ({size / total:.0%})" if total else " MB"
        self._line = f"{self._name}: {size / 1e6:,.1f}{share}"
        if time.monotonic() - self._time > 0.2:
            self._write()

    def _write(self):
        if self._shown and self._line:
            print(f"\r{self._line}", end="", file=sys.stderr, flush=True)
            self._time = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._write()
        if self._shown and self._line:
            print(file=sys.stderr)
