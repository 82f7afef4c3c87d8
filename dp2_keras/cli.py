"""The `dp2` command: what a run costs, how much noise it needs, what a model file guarantees; experiments.

    dp2 epsilon --dataset-size 25000 --batch-size 64 --epochs 100 --noise-multiplier 1.0 --delta 1e-5
    dp2 calibrate --target-epsilon 3.0 --dataset-size 25000 --batch-size 64 --epochs 100
    dp2 statement model.keras
    dp2 audit model.keras --batch-size 64
    dp2 reproduce --table main --quick

It starts without TensorFlow. Of a model file it reads the ledger's bytes and nothing else: no layer is
built and no code of the file runs. `audit` and `reproduce` train, and load TensorFlow when they are asked
for. Exit status: 0, or 2 for wrong arguments, or 1 for a file without a readable ledger, a claim that an
audit refutes, or a sweep that cannot go on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import os
import re
import struct
import sys
import zipfile
from collections.abc import Sequence

import dp2_keras
from dp2_keras import _checks, accounting, calibration
from dp2_keras.entries import Entry, Mechanism, PoissonSampling, ShuffledSampling
from dp2_keras.ledger import LEDGER_NAME, Ledger
from dp2_keras.statement import ACCOUNTANTS, NEIGHBORS, Statement, statement
from dp2_keras.statement_text import round_up

WEIGHTS = "model.weights.h5"
MAX_LEDGER_BYTES = 1 << 24
MAX_INFLATED_BYTES = 1 << 30

_HDF5 = b"\x89HDF\r\n\x1a\n"


class CommandError(Exception):
    """A command cannot go on; the message says why and what to do."""


class LedgerError(CommandError):
    """A file has no ledger that can be read; the message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `dp2` command.

    Args:
        argv: the arguments after the command's name. Defaults to those of the process.

    Returns:
        0 for success, 1 for a command that cannot go on.

    Raises:
        SystemExit: with status 2 for wrong arguments, after one line on stderr.

    Example:
    >>> main("epsilon --dataset-size 25000 --batch-size 64 --epochs 100 --noise-multiplier 1".split())
    epsilon = 3.03051 at delta = 1e-05, proved
    ...
    0
    """
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser(reproduces="reproduce" in argv).parse_args(argv)
    parser = arguments.parser
    try:
        print(arguments.run(arguments), flush=True)
    except BrokenPipeError:  # The reader has seen enough; Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except CommandError as error:
        print(f"{parser.prog}: error: {_one_line(error)}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(_as_options(error, arguments))
    return 0


def read_ledger(path: str | os.PathLike) -> Ledger:
    """Reads the ledger out of a `.keras` or `.weights.h5` file, and nothing else of it.

    Args:
        path: the file.

    Returns:
        The ledger.

    Raises:
        LedgerError: if there is no such file, it is no model file, or its ledger is missing or damaged.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise LedgerError(f"Cannot read {path}: {error.strerror}. Give a `.keras` file.") from error
    try:
        with file:
            document = _ledger_bytes(file, path)
    except LedgerError:
        raise
    except Exception as error:  # Damage can surface anywhere in the readers, as any error.
        raise LedgerError(f"{path} is damaged, or no model file: {error}") from error
    try:
        return Ledger.from_json(document.decode())
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"The ledger in {path} is damaged: {error}") from error


# Reading.


def _ledger_bytes(file, path):
    start = file.read(len(_HDF5))
    if start == _HDF5:
        return _from_hdf5(file, path)
    if start[:2] == b"PK":
        return _from_archive(file, path)
    raise LedgerError(f"{path} is no model file: give a `.keras` or a `.weights.h5` file.")


def _from_archive(file, path):
    with zipfile.ZipFile(file) as archive:
        return _from_hdf5(_member(archive, file, path), path)


def _member(archive, file, path):
    """The weights as a file. Keras does not compress them; if someone did, they are inflated."""
    if WEIGHTS not in archive.namelist():
        raise LedgerError(f"{path} is no model file: there is no {WEIGHTS} in it.")
    member = archive.getinfo(WEIGHTS)
    with archive.open(member) as weights:  # Checks the header.
        if member.compress_type == zipfile.ZIP_STORED:
            return _Window(file, member)
        if member.compress_type != zipfile.ZIP_DEFLATED or member.file_size > MAX_INFLATED_BYTES:
            raise LedgerError(
                f"{path} is compressed in a way that is not read here. Save it again with Keras."
            )
        return io.BytesIO(weights.read())


def _from_hdf5(file, path):
    import h5py  # Comes with TensorFlow, and does not import it.

    with h5py.File(file, "r") as weights:
        return _dataset(weights, path)[()].tobytes()


def _dataset(weights, path):
    """The ledger's dataset; refused if it would lead out of the file or is not what a model saves."""
    import h5py

    if LEDGER_NAME not in weights:
        raise LedgerError(f"{path} holds no ledger: it was not saved by a private model of dp2_keras.")
    data = weights[LEDGER_NAME] if _is_inside(weights, LEDGER_NAME) else None
    plain = isinstance(data, h5py.Dataset) and not data.is_virtual and not data.external
    if not plain or data.dtype != "uint8" or data.ndim != 1:
        raise LedgerError(f"The ledger in {path} is damaged: it is not a list of bytes.")
    if data.size > MAX_LEDGER_BYTES:
        raise LedgerError(f"The ledger in {path} is damaged: it has more than {MAX_LEDGER_BYTES:,} bytes.")
    return data


def _is_inside(group, name):
    """Whether a name is an object of this very file, not a link to another place."""
    import h5py

    return isinstance(group.get(name, getlink=True), h5py.HardLink)


class _Window(io.RawIOBase):
    """An uncompressed member of an archive as a file of its own, of which only what is asked for is read."""

    def __init__(self, file, member):
        file.seek(member.header_offset + 26)
        name, extra = struct.unpack("<HH", file.read(4))  # The local header: 30 bytes, then these two.
        self._file, self._position = file, 0
        self._start = member.header_offset + 30 + name + extra
        self._size = member.file_size

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = origin + offset
        return self._position

    def tell(self):
        return self._position

    def readinto(self, buffer):
        self._file.seek(self._start + self._position)
        wanted = max(0, min(len(buffer), self._size - self._position))
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


# Commands: each returns what is printed.


def _epsilon(arguments):
    return _cost(_checked(arguments), _sampling(arguments), arguments)


def _calibrate(arguments):
    _checks.positive(target_epsilon=arguments.target_epsilon)
    sampling = _sampling(arguments)
    sigma = calibration.calibrate_noise_multiplier(
        arguments.target_epsilon,
        accounting.default_delta(sampling.dataset_size) if arguments.delta is None else arguments.delta,
        sampling.dataset_size,
        sampling.batch_size,
        arguments.epochs,
        accountant=arguments.accountant,
        neighbors=arguments.neighbors,
    )
    printed = round_up(sigma)
    return f"noise multiplier = {printed}\n{_cost(float(printed), sampling, arguments)}"


def _statement(arguments):
    ledger = read_ledger(arguments.file)
    try:
        result = _stated(ledger, arguments)
    except OverflowError as error:
        raise LedgerError(f"The ledger in {arguments.file} is damaged: {error}") from error
    return result.to_json() if arguments.json else str(result)


def _reproduce(arguments):
    from dp2_keras.experiments import command

    try:
        return command.run(arguments)
    except (OSError, RuntimeError) as error:
        raise CommandError(error) from error


def _audit(arguments):
    from dp2_keras.auditing import command

    try:
        found = command.run(arguments)
    except OSError as error:
        raise CommandError(error) from error
    if not found.passed:
        raise CommandError(found)
    return str(found)


def _stated(ledger, arguments) -> Statement:
    return statement(ledger, arguments.delta, accountant=arguments.accountant, neighbors=arguments.neighbors)


def _checked(arguments):
    _checks.non_negative(noise_multiplier=arguments.noise_multiplier)
    return arguments.noise_multiplier


def _sampling(arguments):
    size, batch_size = arguments.dataset_size, arguments.batch_size
    limit = getattr(arguments, "max_batch_size", None)
    _checks.positive_integer(dataset_size=size, batch_size=batch_size)
    if batch_size > size:
        _checks.fail(f"at most the dataset size, {size}", batch_size=batch_size)
    if not getattr(arguments, "shuffle", False):
        return PoissonSampling(size, batch_size, limit)
    if limit is not None:
        raise ValueError("`max_batch_size` cuts Poisson batches: leave out `shuffle` or `max_batch_size`.")
    return ShuffledSampling(size, batch_size)


def _steps(sampling, arguments):
    """n // B steps are an epoch of Poisson batches; shuffled ones end with a smaller batch, as in Keras."""
    if getattr(arguments, "steps", None) is not None:
        _checks.positive_integer(steps=arguments.steps)
        return arguments.steps
    _checks.positive_integer(epochs=arguments.epochs)
    shuffled = isinstance(sampling, ShuffledSampling)
    return arguments.epochs * (
        sampling.steps_per_pass if shuffled else sampling.dataset_size // sampling.batch_size
    )


def _cost(sigma, sampling, arguments):
    """The price of a run in a few lines."""
    mechanism = Mechanism("DP-SGD", noise_multipliers=(sigma,), l2_norm_clips=(1.0,))
    entry = Entry.of_run(mechanism, sampling, _steps(sampling, arguments))
    return "\n".join(_lines(_stated(Ledger([entry]), arguments).to_dict()))


def _lines(facts):
    (entry,) = facts["entries"]
    kind = "shuffled" if entry["sampling"] == "shuffled" else "Poisson"
    cut = f", cut at {entry['max_batch_size']:,}" if entry["max_batch_size"] else ""
    yield from _figures(facts)
    yield (
        f"  {entry['steps']:,} steps of {kind} batches of {entry['batch_size']:,}{cut} out of "
        f"{entry['dataset_size']:,} examples, noise multiplier {entry['noise_multipliers'][0]!r}"
    )
    yield (
        f"  {facts['accountant'].upper()} accounting ({facts['accountant_library']} "
        f"{facts['accountant_version']}), neighbours: {_RELATIONS[facts['neighbors']]}"
    )
    if facts["delta_is_default"]:
        yield "  delta by default: the largest power of ten not above 1 / n"
    if facts["delta_is_large"]:
        yield "  CAUTION: delta is above 1 / n, which allows a mechanism that publishes an example outright"


_RELATIONS = {
    "add_remove": "one example added or removed, n public",
    "replace_one": "one example replaced, n public",
}


def _figures(facts):
    mark = "proved" if facts["guarantee"] else "no guarantee"
    yield f"epsilon = {round_up(facts['epsilon'])} at delta = {facts['delta']!r}, {mark}"
    if facts["epsilon_assumed"] is not None:
        yield (
            f"epsilon = {round_up(facts['epsilon_assumed'])} at delta = {facts['delta']!r}, assumed and NOT "
            "proved: as if the batches had been Poisson samples"
        )


# Arguments.


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {_one_line(message)} (see {self.prog} --help)\n")


def _parser(reproduces=False):
    parser = _Parser(prog="dp2", description="Differentially private training: costs and guarantees.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="{epsilon,calibrate,statement,audit,reproduce}", required=True)
    _add_epsilon(commands)
    _add_calibrate(commands)
    _add_statement(commands)
    _add_audit(commands)
    _add_reproduce(commands, reproduces)
    return parser


def _add_epsilon(commands):
    parser = _command(commands, "epsilon", _epsilon, "what a run costs")
    _add_run(parser)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=int, help="n // B steps each (shuffled: n / B, rounded up)")
    length.add_argument("--steps", type=int, help="number of steps, instead of --epochs")
    parser.add_argument("--noise-multiplier", type=float, required=True, help="sigma, at least 0")
    parser.add_argument("--shuffle", action="store_true", help="shuffled batches instead of Poisson ones")
    parser.add_argument("--max-batch-size", type=int, help="Poisson batches are cut to this size")


def _add_calibrate(commands):
    parser = _command(commands, "calibrate", _calibrate, "the least noise that keeps to an epsilon")
    parser.add_argument("--target-epsilon", type=float, required=True, help="the most that the run may cost")
    _add_run(parser)
    parser.add_argument("--epochs", type=int, required=True, help="n // B steps each")


def _add_statement(commands):
    parser = _command(commands, "statement", _statement, "what a saved model guarantees")
    parser.add_argument("file", help="a .keras or .weights.h5 file")
    parser.add_argument("--json", action="store_true", help="the same facts as JSON")


def _add_audit(commands):
    words = "how much privacy the training step of a saved model loses at least, measured"
    parser = commands.add_parser("audit", help=words, description=f"Prints {words}.", allow_abbrev=False)
    parser.set_defaults(run=_audit, parser=parser)
    parser.add_argument("file", help="a .keras file of a compiled private model")
    parser.add_argument("--batch-size", type=int, required=True, help="B, the expected batch size")
    parser.add_argument(
        "--epochs", type=int, default=1, help="passes over the canaries (default: %(default)s)"
    )
    parser.add_argument("--num-canaries", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--confidence", type=float, default=0.95, help="default: %(default)s")
    parser.add_argument("--delta", type=float, help="above 0 and below 1 (default: a power of ten)")
    parser.add_argument("--plot", metavar="FILE", help="draws the canaries' scores")


def _add_reproduce(commands, is_asked_for):
    words = "the paper's tables and figures, run again"
    parser = commands.add_parser("reproduce", help=words, description=f"Makes {words}.", allow_abbrev=False)
    parser.set_defaults(run=_reproduce, parser=parser)
    if is_asked_for:  # Its choices are in files that no other command should have to read.
        from dp2_keras.experiments import command

        command.add_arguments(parser)


def _command(commands, name, run, words):
    parser = commands.add_parser(name, help=words, description=f"Prints {words}.", allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--delta", type=float, help="above 0 and below 1 (default: a power of ten by n)")
    parser.add_argument("--accountant", choices=ACCOUNTANTS, default="rdp", help="default: %(default)s")
    parser.add_argument("--neighbors", choices=NEIGHBORS, default="add_remove", help="default: %(default)s")
    return parser


def _add_run(parser):
    parser.add_argument("--dataset-size", type=int, required=True, help="n, the number of examples")
    parser.add_argument("--batch-size", type=int, required=True, help="B, the expected batch size")


def _version():
    return f"dp2_keras {dp2_keras.__version__} (dp-accounting {importlib.metadata.version('dp-accounting')})"


def _as_options(error, arguments):
    """The message of an argument check with the names as they are typed here."""
    names = "|".join(vars(arguments))
    return re.sub(f"`({names})`", lambda match: "--" + match[1].replace("_", "-"), str(error))


def _one_line(message):
    return " ".join(str(message).split())


if __name__ == "__main__":
    sys.exit(main())
