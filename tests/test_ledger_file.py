"""The file counts every step that may have run, whatever happens to the run, the machine or the file."""

import copy
import errno
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp2_keras import ledger_file
from dp2_keras.entries import Entry, Mechanism, PoissonSampling, ShuffledSampling
from dp2_keras.ledger import Ledger
from dp2_keras.ledger_file import LedgerFile

DP2 = Mechanism("DP2RMSprop", noise_multipliers=(1.0,), l2_norm_clips=(5.0, 0.5))
IMDB = PoissonSampling(dataset_size=25_000, batch_size=64)
SHUFFLED = ShuffledSampling(dataset_size=100, batch_size=30)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def no_sync(monkeypatch):
    """For tests of what is written, not of when: they open thousands of files."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def counted(path):
    with LedgerFile(path) as file:
        return file.ledger


def write_some(path):
    with LedgerFile(path) as file:
        file.add(Ledger([Entry.of_run(DP2, SHUFFLED, 5)]))
        file.reserve(DP2, IMDB, 390)
        file.settle(390)
        file.reserve(DP2, SHUFFLED, 8)


# Counting.


def test_a_new_file_has_counted_nothing(path):
    assert counted(path) == Ledger()


def test_a_reservation_counts_in_full_until_it_is_settled(path):
    with LedgerFile(path) as file:
        file.reserve(DP2, SHUFFLED, 390)
        assert file.ledger.entries == (Entry.of_run(DP2, SHUFFLED, 390),)
        file.settle(100)
        assert file.ledger.entries == (Entry.of_run(DP2, SHUFFLED, 100),)
    assert counted(path).entries == (Entry.of_run(DP2, SHUFFLED, 100),)


def test_a_run_that_took_no_step_costs_nothing(path):
    with LedgerFile(path) as file:
        file.reserve(DP2, IMDB, 390)
        file.settle(0)
    assert counted(path) == Ledger()


def test_a_run_that_was_never_settled_stands_before_the_next(path):
    with LedgerFile(path) as file:
        file.reserve(DP2, IMDB, 390)
    with LedgerFile(path) as file:
        file.reserve(DP2, IMDB, 390)
        file.reserve(DP2, IMDB, 390)
        file.settle(10)
    assert counted(path).steps == 390 + 390 + 10


def test_steps_beyond_the_reservation_are_counted_and_refused(path):
    with LedgerFile(path) as file:
        file.reserve(DP2, IMDB, 5)
        with pytest.raises(ValueError, match="at most the 5 steps that were reserved .* Received: steps=6"):
            file.settle(6)
        assert file.ledger.steps == 6
        with pytest.raises(ValueError, match="at most the 0 steps that were reserved"):
            file.settle(1)
        file.settle(0)
    assert counted(path).steps == 6


def test_a_models_earlier_steps_are_added_as_far_as_they_are_missing(path):
    history = Ledger([Entry.of_run(DP2, IMDB, 100)])
    with LedgerFile(path) as file:
        file.add(history)
        size = os.path.getsize(path)
        file.add(history)
        assert os.path.getsize(path) == size
        file.add(Ledger([Entry.of_run(DP2, IMDB, 120), Entry.of_run(DP2, SHUFFLED, 3)]))
    assert counted(path) == Ledger([Entry.of_run(DP2, IMDB, 120), Entry.of_run(DP2, SHUFFLED, 3)])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([IMDB, SHUFFLED]), st.integers(1, 50), st.floats(0, 1), st.integers(0, 3)),
        max_size=5,
    )
)
def test_any_history_counts_at_least_what_ran_and_exactly_if_settled(tmp_path_factory, history):
    path, ran, exact = tmp_path_factory.mktemp("any") / "ledger.jsonl", Ledger(), True
    file = LedgerFile(path)
    for sampling, reserved, fraction, end in history:
        steps = int(reserved * fraction)
        file.reserve(DP2, sampling, reserved)
        ran = ran.merged([Entry.of_run(DP2, sampling, steps)] if steps else [])
        if end:
            file.settle(steps)
        else:
            exact = False
        if end != 1:
            file.close()
            file = LedgerFile(path)
    assert file.ledger.covers(ran) and (not exact or file.ledger == ran)
    file.close()


# Crashes.


def test_a_file_cut_at_any_byte_counts_all_that_was_acknowledged(path, no_sync):
    """A crash leaves the bytes so far; steps ran only after the last byte of their reservation."""
    acknowledged = [(0, 0)]
    with LedgerFile(path) as file:
        for reserved, took in [(10, 7), (20, 20), (30, 1)]:
            ran = file.ledger.steps
            file.reserve(DP2, IMDB, reserved)
            acknowledged.append((os.path.getsize(path), ran + took))
            file.settle(took)
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        may_have_run = max(steps for at, steps in acknowledged if at <= size)
        assert counted(path).steps >= may_have_run
        with LedgerFile(path) as file:
            file.reserve(DP2, IMDB, 1000)
        assert counted(path).steps >= may_have_run + 1000


KILLS = """
import os, random, signal, sys, time
from dp2_keras.entries import Mechanism, PoissonSampling
from dp2_keras.ledger_file import LedgerFile

path, steps_path, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
mechanism, sampling = Mechanism("DPSGD", (1.0,), (1.0,)), PoissonSampling(25_000, 64)

def train():
    steps = os.open(steps_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with LedgerFile(path) as file:
        while True:
            reserved = random.randrange(1, 20)
            file.reserve(mechanism, sampling, reserved)
            ran = random.randrange(reserved + 1)
            for _ in range(ran):
                os.write(steps, b".")
            file.settle(ran)

slack = 0
for kill in range(kills):
    random.seed(kill)
    child = os.fork()
    if not child:
        train()
    time.sleep(random.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with LedgerFile(path) as file:
        counted = file.ledger.steps
    ran = os.path.getsize(steps_path) if os.path.exists(steps_path) else 0
    slack += 20
    assert ran <= counted <= ran + slack, (kill, ran, counted)
print(ran, counted)
"""


def test_a_process_killed_at_any_time_has_not_taken_a_step_that_is_not_counted(tmp_path):
    arguments = [str(tmp_path / "ledger.jsonl"), str(tmp_path / "steps"), "60"]
    done = subprocess.run([sys.executable, "-c", KILLS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ran, counted = map(int, done.stdout.split())
    assert 0 < ran <= counted


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_lets_no_step_run(path, monkeypatch, call):
    with LedgerFile(path) as file:
        file.reserve(DP2, IMDB, 5)

        def full(opened, data=None):
            if call == "write":
                opened.write(data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as context:
            context.setattr(*((ledger_file, "_write") if call == "write" else (os, "fsync")), full)
            with pytest.raises(OSError, match="No space left"):
                file.settle(3)
        with pytest.raises(RuntimeError, match="could not be written before"):
            file.reserve(DP2, IMDB, 5)
        assert file.ledger.steps == 5
    assert counted(path).steps == (5 if call == "write" else 3)


def test_a_write_in_parts_is_finished(path):
    class Slow:
        parts = []

        def write(self, data):
            self.parts.append(data[:3])
            return len(data[:3])

    ledger_file._write(Slow(), b"0123456789")
    assert b"".join(Slow.parts) == b"0123456789"


def test_a_reservation_is_on_the_disk_before_it_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    with LedgerFile(path) as file:
        assert len(synced) == 2  # The directory, and the file.
        file.reserve(DP2, IMDB, 5)
        assert synced[2:] == [os.path.getsize(path)]


# Damage.


def test_any_changed_byte_is_refused(path, no_sync):
    write_some(path)
    data = path.read_bytes()
    for at in range(len(data)):
        for byte in {data[at] ^ 1, ord("\n")} - {data[at]}:
            path.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
            with pytest.raises(ValueError, match=f"{path.name}.* is damaged or was changed, in line"):
                LedgerFile(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[1:],
        lambda lines: lines[:1] + lines[2:],
        lambda lines: lines[:1] + lines,
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [*lines, b"{}\n"],
        lambda lines: [*lines, b"\n"],
        lambda lines: [b"\xff\xfe\n"],
        lambda lines: [line.replace(b": ", b":") for line in lines],
    ],
)
def test_lines_that_are_lost_moved_or_made_up_are_refused(path, change):
    write_some(path)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="is damaged or was changed"):
        LedgerFile(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "happens",
    [
        lambda path: path.unlink(),
        lambda path: path.rename(path.with_suffix(".old")),
        lambda path: path.write_bytes(b""),
        lambda path: (path.unlink(), path.write_bytes(b"")),
    ],
)
def test_a_file_that_is_taken_away_is_not_written_on(path, happens):
    with LedgerFile(path) as file:
        file.reserve(DP2, IMDB, 5)
        happens(path)
        with pytest.raises(RuntimeError, match="was moved, replaced or changed since it was opened"):
            file.reserve(DP2, IMDB, 5)


# One writer.


def test_a_file_in_use_is_refused_in_this_process_and_in_others(path):
    script = f"from dp2_keras.ledger_file import LedgerFile; LedgerFile({str(path)!r})"
    with LedgerFile(path):
        with pytest.raises(BlockingIOError, match=f"{path.name}.* is in use by another run"):
            LedgerFile(path)
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert "BlockingIOError" in other.stderr and "is in use by another run" in other.stderr
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_file_that_was_refused_is_not_left_locked(path):
    path.write_bytes(b"{}\n")
    with pytest.raises(ValueError, match="damaged"):
        LedgerFile(path)
    path.write_bytes(b"")
    assert counted(path) == Ledger()


def test_a_closed_file_is_not_written(path):
    with LedgerFile(path) as file:
        file.reserve(DP2, IMDB, 5)
    with pytest.raises(RuntimeError, match="is closed"):
        file.settle(0)
    assert counted(path).steps == 5


def test_a_fork_cannot_write(path, monkeypatch):
    with LedgerFile(path) as file:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="belongs to the process that opened it"):
            file.reserve(DP2, IMDB, 5)
        monkeypatch.undo()
    assert counted(path) == Ledger()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_cannot_be_copied_or_pickled(path, duplicate):
    with LedgerFile(path) as file:
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicate(file)


def test_needs_a_system_that_locks(path, monkeypatch):
    monkeypatch.setattr(ledger_file, "fcntl", None)
    with pytest.raises(OSError, match="needs a system that can lock files"):
        LedgerFile(path)
