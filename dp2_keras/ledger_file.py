"""A ledger on disk that is written ahead, so that no crash and no other branch is forgotten.

    reserve(k)   k steps are on the disk, counted in full, before the first of them runs
    settle(s)    the run is over: s steps ran, the rest of its reservation is given back

    line i = {"sequence": i, "record": ..., "sha256": SHA-256(hash of line i - 1, i, record)}

After a crash the settlement is missing and the reservation stands, so the file may count too many steps and
never too few. A last line that is incomplete is dropped: the call that wrote it never returned, so it is
either a reservation of which no step ran, or a settlement whose reservation stands. Any other change is
refused. The hashes find damage and edits, not a forger who computes them anew or cuts off whole lines: keep
the file where only its owner can write.
"""

from __future__ import annotations

import hashlib
import json
import os

from dp2_keras import _checks
from dp2_keras.entries import Entry, Mechanism
from dp2_keras.ledger import Ledger

try:
    import fcntl
except ImportError:  # Not a POSIX system.
    fcntl = None

_FIRST_HASH = hashlib.sha256(b"dp2_keras ledger file, version 1").hexdigest()


class LedgerFile:
    """Counts the steps of every run that uses the file, whatever becomes of the run.

    The file is created if it does not exist, and locked until `close`. All weights that were trained with it
    are counted together: branches from one checkpoint, and steps that a crash lost.

    Args:
        path: where the file is.

    Raises:
        BlockingIOError: if another process, or another `LedgerFile`, has the file open.
        ValueError: if the file is not one that this class wrote.
        OSError: if the file cannot be opened or locked.

    Example:
    >>> import tempfile
    >>> from dp2_keras.entries import PoissonSampling
    >>> path = os.path.join(tempfile.mkdtemp(), "ledger.jsonl")
    >>> with LedgerFile(path) as file:
    ...     file.reserve(Mechanism("DPSGD", (1.0,), (1.0,)), PoissonSampling(25_000, 64), steps=390)
    >>> with LedgerFile(path) as file:
    ...     file.ledger.steps
    390
    """

    def __init__(self, path: str | os.PathLike):
        self.path = path
        self._process = os.getpid()
        self._settled, self._reserved = Ledger(), None
        self._sequence, self._hash, self._size = 0, _FIRST_HASH, 0
        self._file = _open_locked(path)
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise
        self._is_sound = True

    @property
    def ledger(self) -> Ledger:
        """All that the file accounts for; a run that is not settled counts as if it ran in full."""
        return self._settled.merged([self._reserved] if self._reserved else [])

    def reserve(self, mechanism: Mechanism, sampling, steps: int, origin: str = "") -> None:
        """Counts the steps of a new run, on disk when this returns. Only then may they run.

        A run before it that was not settled stands in full.

        Args:
            mechanism: what a step releases.
            sampling: how its batch is drawn.
            steps: the most steps that the run may take, at least 1.
            origin: who takes them.

        Raises:
            ValueError: for a value out of range.
            OSError: if it could not be written; no step may run, and the object can no longer be used.
            RuntimeError: if the object cannot be used: see `settle`.
        """
        run = Entry.of_run(mechanism, sampling, steps, origin)
        self._append({"reserve": Ledger([run]).to_json()})

    def settle(self, steps: int) -> None:
        """Ends the open run, of which so many steps ran. Without an open run, 0 steps are nothing to write.

        Args:
            steps: how many.

        Raises:
            ValueError: if more ran than were reserved. They are counted nevertheless if a run is open.
            OSError: if it could not be written; the reservation stands, and the object can no longer be used.
            RuntimeError: if the object is closed, was carried into another process by a fork, if a write
                failed before, or if the file is no longer the one that was opened.
        """
        _checks.non_negative_integer(steps=steps)
        reserved = self._reserved.steps if self._reserved else 0
        if self._reserved:
            self._append({"settle": int(steps)})
        if steps > reserved:
            _checks.fail(f"at most the {reserved} steps that were reserved before they ran", steps=steps)

    def add(self, ledger: Ledger) -> None:
        """Counts what a model did before it used this file, as far as the file has not counted as much.

        Afterwards the file covers `ledger`: a model that resumes from a checkpoint of its own adds nothing.

        Args:
            ledger: the model's.

        Raises:
            OSError, RuntimeError: as for `reserve`.
        """
        missing = ledger.beyond(self.ledger)
        if missing.entries:
            self._append({"add": missing.to_json()})

    def close(self) -> None:
        """Gives the file free. A run that was not settled stands in full."""
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __reduce_ex__(self, protocol):
        raise TypeError("A LedgerFile cannot be copied or pickled: open its path after it is closed.")

    def _read(self):
        """Replays the file, and removes what a crash left of a line."""
        data = self._file.readall()
        *lines, rest = data.split(b"\n")
        for line in [*lines, rest] if _holds_a_document(rest) else lines:
            self._replay(line)
        if len(data) > self._size:
            self._file.truncate(self._size)
        elif len(data) < self._size:
            _write(self._file, b"\n")
        os.fsync(self._file.fileno())

    def _replay(self, line):
        """Applies one line, if it is to the byte what this class would have written here."""
        try:
            record = json.loads(line)["record"]
            expected, digest = self._line(record)
            if line + b"\n" != expected:
                raise ValueError("its hash is wrong")
            self._apply(record, expected, digest)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"The ledger file {os.fspath(self.path)!r} is damaged or was changed, in line "
                f"{self._sequence + 1} ({error}). It cannot be trusted to count what was spent: restore it "
                "or do not train on."
            ) from error

    def _line(self, record):
        """The next line, and its hash."""
        digest = hashlib.sha256(json.dumps([self._hash, self._sequence, record]).encode()).hexdigest()
        line = json.dumps({"sequence": self._sequence, "record": record, "sha256": digest})
        return line.encode() + b"\n", digest

    def _append(self, record):
        """Writes a line through to the disk. Until that is done, the object counts as unsound."""
        self._check_sound()
        line, digest = self._line(record)
        self._is_sound = False
        _write(self._file, line)
        os.fsync(self._file.fileno())
        self._apply(record, line, digest)
        self._is_sound = True

    def _apply(self, record, line, digest):
        """Counts what a line says."""
        ((kind, value),) = record.items()
        if kind == "settle":
            mechanism, sampling, origin = self._reserved.key
            ran = [Entry.of_run(mechanism, sampling, value, origin)] if value else []
            self._settled = self._settled.merged(ran)
            self._reserved = None
        elif kind == "reserve":
            self._settled = self.ledger
            (self._reserved,) = Ledger.from_json(value)
        elif kind == "add":
            self._settled = self._settled.merged(Ledger.from_json(value))
        else:
            raise ValueError(f"it has an unknown record, {kind!r}")
        self._sequence, self._hash, self._size = self._sequence + 1, digest, self._size + len(line)

    def _check_sound(self):
        """Refuses to write where the count could get lost."""
        if self._file.closed:
            self._refuse("is closed")
        if self._process != os.getpid():
            self._refuse("belongs to the process that opened it, and this is a fork of it")
        if not self._is_sound:
            self._refuse("could not be written before")
        if not _is_same_file(self.path, self._file) or os.fstat(self._file.fileno()).st_size != self._size:
            self._refuse("was moved, replaced or changed since it was opened")

    def _refuse(self, reason):
        raise RuntimeError(
            f"The ledger file {os.fspath(self.path)!r} {reason}. Call the model's "
            "`release_ledger_file()`, and then `fit` with the file anew."
        )


def _open_locked(path):
    """The file at `path`, created if need be, and locked for as long as it is open."""
    if fcntl is None:
        raise OSError(
            "A ledger file needs a system that can lock files (fcntl.flock), such as Linux or macOS."
        )
    file = open(path, "ab+", buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_same_file(path, file):
            raise BlockingIOError
        _sync_directory(path)
        file.seek(0)
    except BaseException as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise BlockingIOError(
                f"The ledger file {os.fspath(path)!r} is in use by another run. In the same process, "
                "`model.release_ledger_file()` gives it free."
            ) from None
        raise
    return file


def _is_same_file(path, file):
    """Whether the path still leads to the open file."""
    return os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file.fileno()))


def _sync_directory(path):
    """Makes sure that a file that was just created outlives a crash of the machine."""
    directory = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write(file, data):
    """Writes all bytes; the system may take them in parts."""
    while data:
        data = data[file.write(data) :]


def _holds_a_document(text):
    """Whether a line without its end is more than an incomplete beginning."""
    try:
        json.JSONDecoder().raw_decode(text.decode())
    except ValueError:
        return False
    return True
