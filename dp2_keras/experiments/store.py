"""Rows in a file, one line each, by the key of their run.

    <path>   JSON lines, only ever appended to

A line is written by one system call and synchronised, so that a killed sweep loses the runs under way and
no others; half a line at the end, which a machine that fails may leave, is cut off by the next call.
Numbers that JSON has no word for are texts ("inf", "nan"), which `float` reads.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any


class Store:
    """The rows of a sweep. Use it in a `with` statement; one process at a time may.

    Args:
        path: the file, made if need be.

    Raises:
        OSError: if another process has it open.
        ValueError: if a line other than the last is damaged.

    Example:
    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "rows.jsonl")
    >>> with Store(path) as store:
    ...     store.add({"key": "a", "status": "done", "epsilon": math.inf})
    >>> with Store(path) as store:
    ...     store.rows["a"]["epsilon"]
    'inf'
    """

    def __init__(self, path: str | os.PathLike):
        self._path = os.fspath(path)
        self._file = None
        self.rows: dict[str, dict[str, Any]] = {}

    def __enter__(self):
        os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
        self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise OSError(
                    f"{self._path} is in use by another sweep: wait for it, or choose another."
                ) from error
            raise
        return self

    def __exit__(self, *exception):
        self._file.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends a row; a row of the same key counts no more."""
        row = plain(row)
        os.write(self._file.fileno(), json.dumps(row, allow_nan=False).encode() + b"\n")
        os.fsync(self._file.fileno())
        self.rows[row["key"]] = row

    def has(self, key: str, retry_failed: bool = False) -> bool:
        """Whether a run need not run."""
        return key in self.rows and not (retry_failed and self.rows[key]["status"] == "failed")

    def of(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        """The rows of some runs that are done, in the order of the keys."""
        found = [self.rows[key] for key in keys if key in self.rows]
        return [row for row in found if row["status"] == "done"]

    def _read(self):
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{self._path} is damaged in line {number}: {error}") from error
            self.rows[row["key"]] = row


def plain(value: Any) -> Any:
    """The value as JSON can hold it, numbers without a word in JSON as texts.

    Example:
    >>> plain({"epsilon": math.inf, "steps": (1, 2.5)})
    {'epsilon': 'inf', 'steps': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    return value
