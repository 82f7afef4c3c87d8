"""The command prints what the library computes, reads files without trusting them, and fails in one line."""

import json
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest

import dp2_keras
from dp2_keras import accounting, cli
from dp2_keras.entries import Entry, Mechanism, PoissonSampling, UnknownSampling
from dp2_keras.ledger import LEDGER_NAME, Ledger
from dp2_keras.statement import statement
from dp2_keras.statement_text import round_up

IMDB = "--dataset-size 25000 --batch-size 64 --epochs 100"
SMALL = "--dataset-size 1000 --batch-size 100"
ONE_STEP = "--noise-multiplier 1 --steps 1"
MECHANISM = Mechanism("DP2RMSprop", noise_multipliers=(1.0,), l2_norm_clips=(5.0, 0.5))
LEDGER = Ledger([Entry.of_run(MECHANISM, PoissonSampling(25_000, 64), 39_000)])


@pytest.fixture
def run(capsys):
    """Runs the command; its exit status, what it printed, and its errors."""

    def run(line, *paths):
        try:
            status = cli.main([*line.split(), *map(str, paths)])
        except SystemExit as stop:
            status = stop.code
        return (status, *capsys.readouterr())

    return run


def assert_fails(result, status, *words):
    """In one line that says what is wrong."""
    assert result[0] == status
    assert result[1] == ""
    assert result[2].startswith("dp2") and ": error: " in result[2]
    assert result[2].endswith("\n") and result[2].count("\n") == 1
    for word in words:
        assert word in result[2]


# epsilon


@pytest.mark.parametrize(
    "options, figure",
    [
        (f"{IMDB} --noise-multiplier 1.0 --delta 1e-5", "epsilon = 3.03051 at delta = 1e-05, proved"),
        (f"{IMDB} --noise-multiplier 1", "epsilon = 3.03051 at delta = 1e-05, proved"),
        (f"{IMDB} --noise-multiplier 1 --accountant pld", "epsilon = 2.786"),
        (f"{IMDB} --noise-multiplier 0", "epsilon = infinity at delta = 1e-05, no guarantee"),
        (f"{IMDB} --noise-multiplier 1 --shuffle", "epsilon = 96.11"),
    ],
)
def test_epsilon_prints_the_known_figures_first(run, options, figure):
    status, out, err = run(f"epsilon {options}")
    assert (status, err) == (0, "")
    assert out.startswith(figure)


@pytest.mark.parametrize("neighbors", ["add_remove", "replace_one"])
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("limit", [None, 150])
def test_epsilon_is_that_of_the_library(run, accountant, neighbors, limit):
    options = f"--accountant {accountant} --neighbors {neighbors}" + (
        f" --max-batch-size {limit}" if limit else ""
    )
    _, out, _ = run(f"epsilon {SMALL} --steps 7 --noise-multiplier 2.5 --delta 1e-3 {options}")
    mechanism = Mechanism("any", (2.5,), (1.0,))
    ledger = Ledger([Entry.of_run(mechanism, PoissonSampling(1000, 100, limit), 7)])
    expected = ledger.epsilon(1e-3, accountant=accountant, neighbors=neighbors)
    assert out.startswith(f"epsilon = {round_up(expected)} at delta = 0.001, ")
    assert f"{accountant.upper()} accounting (dp-accounting " in out
    assert ("replaced" in out) == (neighbors == "replace_one")
    assert ("cut at 150" in out) == (limit is not None)


@pytest.mark.parametrize(
    "options, steps",
    [
        ("--dataset-size 1050 --batch-size 100 --epochs 3", "30 steps of Poisson"),
        ("--dataset-size 1050 --batch-size 100 --steps 31", "31 steps of Poisson"),
        ("--dataset-size 1050 --batch-size 100 --epochs 3 --shuffle", "33 steps of shuffled"),
    ],
)
def test_epoch_is_n_over_b_steps_rounded_down_or_as_keras_shuffles(run, options, steps):
    assert (
        f"  {steps} batches of 100 out of 1,050 examples" in run(f"epsilon {options} --noise-multiplier 1")[1]
    )


def test_shuffled_batches_have_a_proved_and_an_assumed_figure(run):
    lines = run(f"epsilon {IMDB} --noise-multiplier 1 --shuffle")[1].splitlines()
    assert lines[0].startswith("epsilon = 96.11") and lines[0].endswith("at delta = 1e-05, proved")
    assert lines[1].startswith("epsilon = 3.03") and "assumed and NOT proved" in lines[1]


def test_default_delta_is_named_and_a_large_one_cautioned(run):
    assert "delta by default" in run(f"epsilon {IMDB} --noise-multiplier 1")[1]
    chosen = run(f"epsilon {IMDB} --noise-multiplier 1 --delta 1e-3")[1]
    assert "delta by default" not in chosen and "CAUTION: delta is above 1 / n" in chosen


# calibrate


@pytest.mark.parametrize("target", [0.5, 3.0, 8.0])
def test_calibrated_noise_is_the_least_that_keeps_to_the_target(run, target):
    status, out, err = run(f"calibrate --target-epsilon {target} {SMALL} --epochs 5 --delta 1e-4")
    assert (status, err) == (0, "")
    sigma = float(out.splitlines()[0].removeprefix("noise multiplier = "))
    cost = lambda s: accounting.epsilon(accounting.dp_event(s, 0.1, 50), 1e-4)  # noqa: E731
    assert cost(sigma) <= target < cost(sigma - 2e-4)
    assert f"epsilon = {round_up(cost(sigma))} at delta = 0.0001, proved" in out


def test_calibrates_the_papers_setting(run):
    assert run(f"calibrate --target-epsilon 3 {IMDB}")[1].startswith(
        "noise multiplier = 1.00557\nepsilon = 2.999"
    )


def test_calibrated_noise_is_what_epsilon_prices(run):
    calibrated = run(f"calibrate --target-epsilon 2 {SMALL} --epochs 5")[1].splitlines()
    sigma = calibrated[0].split()[-1]
    assert run(f"epsilon {SMALL} --epochs 5 --noise-multiplier {sigma}")[1].splitlines() == calibrated[1:]


# Wrong arguments


@pytest.mark.parametrize(
    "line, words",
    [
        ("", ["{epsilon,calibrate,statement,audit,reproduce}"]),
        ("price", ["price"]),
        ("epsilon", ["required", "--dataset-size", "--batch-size", "--noise-multiplier"]),
        (f"epsilon {SMALL} --noise-multiplier 1", ["one of the arguments --epochs --steps is required"]),
        (f"epsilon {SMALL} --noise-multiplier 1 --epochs 1 --steps 1", ["not allowed with"]),
        (f"epsilon {SMALL} --noise-multiplier -1 --epochs 1", ["--noise-multiplier must be", "-1"]),
        (f"epsilon {SMALL} --noise-multiplier nan --epochs 1", ["--noise-multiplier must be", "nan"]),
        (f"epsilon {SMALL} --noise-multiplier x --epochs 1", ["--noise-multiplier", "'x'"]),
        (f"epsilon {SMALL} --noise-multiplier 1 --epochs 0", ["--epochs must be a positive integer"]),
        (f"epsilon {SMALL} --noise-multiplier 1 --epochs 1.5", ["--epochs", "'1.5'"]),
        (f"epsilon {SMALL} --noise-multiplier 1 --steps 0", ["--steps must be a positive integer"]),
        (f"epsilon {SMALL} {ONE_STEP} --delta 1", ["--delta must be", "less than 1"]),
        (f"epsilon {SMALL} {ONE_STEP} --delta nan", ["--delta must be"]),
        (f"epsilon {SMALL} {ONE_STEP} --accountant gdp", ["--accountant", "rdp", "pld"]),
        (f"epsilon {SMALL} {ONE_STEP} --neighbors user", ["--neighbors", "replace_one"]),
        (f"epsilon {SMALL} {ONE_STEP} --max-batch-size 0", ["--max-batch-size must be"]),
        (f"epsilon {SMALL} {ONE_STEP} --max-batch-size 9 --shuffle", ["leave out --shuffle or"]),
        (f"epsilon {SMALL} --noise 1 --steps 1", ["--noise-multiplier"]),
        (f"epsilon --dataset-size 10 --batch-size 11 {ONE_STEP}", ["--batch-size must be at most"]),
        (f"epsilon --dataset-size 0 --batch-size 1 {ONE_STEP}", ["--dataset-size must be a positive"]),
        (f"epsilon --dataset-size 1 --batch-size 1 {ONE_STEP}", ["--dataset-size must be at least 2"]),
        (f"calibrate {SMALL} --epochs 1", ["required", "--target-epsilon"]),
        (f"calibrate {SMALL} --epochs 1 --target-epsilon 0", ["--target-epsilon must be"]),
        (f"calibrate {SMALL} --epochs 1 --target-epsilon inf", ["--target-epsilon must be"]),
        (f"calibrate {SMALL} --epochs 0 --target-epsilon 1", ["--epochs must be a positive integer"]),
        (f"calibrate {SMALL} --epochs 1 --target-epsilon 1 --delta 2", ["--delta must be"]),
        ("statement", ["required", "file"]),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line_and_status_2(run, line, words):
    assert_fails(run(line), 2, *words)


@pytest.mark.parametrize("line", ["--help", "epsilon --help", "calibrate --help", "statement --help"])
def test_help_is_no_error(run, line):
    status, out, err = run(line)
    assert (status, err) == (0, "") and "usage: dp2" in out


def test_version(run):
    status, out, _ = run("--version")
    assert status == 0 and out.startswith(f"dp2_keras {dp2_keras.__version__} (dp-accounting ")


# statement: files made by hand.


def write_weights(path, ledger=LEDGER, **options):
    """An HDF5 file with the ledger where a model keeps it, and other weights."""
    document = ledger.to_json().encode() if isinstance(ledger, Ledger) else ledger
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = np.zeros((3, 4))
        if document is not None:
            file.create_dataset(LEDGER_NAME, data=np.frombuffer(document, np.uint8), **options)
    return path


def write_archive(path, weights, compression=zipfile.ZIP_STORED, member="model.weights.h5"):
    """A `.keras` file; its configuration is of no use to anyone."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", "this would have to be parsed, and run")
        archive.write(weights, member)
    return path


@pytest.fixture
def weights(tmp_path):
    return write_weights(tmp_path / "a.weights.h5")


@pytest.fixture
def model(tmp_path, weights):
    return write_archive(tmp_path / "a.keras", weights)


MODELS = {
    "weights": lambda folder: write_weights(folder / "m.h5"),
    "weights in chunks": lambda folder: write_weights(folder / "m.h5", chunks=True, compression="gzip"),
    "stored": lambda folder: write_archive(folder / "m.keras", write_weights(folder / "w")),
    "compressed": lambda folder: write_archive(
        folder / "m.keras", write_weights(folder / "w"), zipfile.ZIP_DEFLATED
    ),
    "renamed": lambda folder: write_archive(folder / "m.bin", write_weights(folder / "w")),
}


@pytest.mark.parametrize("kind", MODELS)
def test_reads_the_ledger_of_a_model_file(kind, tmp_path):
    assert cli.read_ledger(MODELS[kind](tmp_path)) == LEDGER


@pytest.mark.parametrize("kind", ["stored", "compressed"])
def test_reads_a_ledger_behind_large_weights(kind, tmp_path):
    with h5py.File(write_weights(tmp_path / "w"), "a") as file:
        file["layers/embedding/vars/0"] = np.random.default_rng(0).normal(size=(1 << 17,))
        del file[LEDGER_NAME]
        file[LEDGER_NAME] = np.frombuffer(LEDGER.to_json().encode(), np.uint8)
    compression = zipfile.ZIP_STORED if kind == "stored" else zipfile.ZIP_DEFLATED
    assert cli.read_ledger(write_archive(tmp_path / "m.keras", tmp_path / "w", compression)) == LEDGER


@pytest.mark.parametrize(
    "options, arguments",
    [
        ("", {}),
        ("--delta 1e-6", dict(delta=1e-6)),
        ("--accountant pld", dict(accountant="pld")),
        ("--neighbors replace_one", dict(neighbors="replace_one")),
    ],
)
def test_statement_is_that_of_the_library(run, model, options, arguments):
    expected = statement(LEDGER, **arguments)
    assert run(f"statement {options}", model) == (0, f"{expected}\n", "")
    assert json.loads(run(f"statement --json {options}", model)[1]) == expected.to_dict()


def test_statement_of_an_empty_ledger_says_so(run, tmp_path):
    status, out, _ = run("statement", write_weights(tmp_path / "w.h5", Ledger()))
    assert status == 0 and "Nothing was trained" in out


def test_statement_needs_delta_where_no_size_is_known(run, tmp_path):
    unknown = Ledger([Entry.of_run(MECHANISM, UnknownSampling(), 3)])
    path = write_weights(tmp_path / "w.h5", unknown)
    assert_fails(run("statement", path), 2, "--delta must be given")
    assert run("statement --delta 1e-5", path)[0] == 0


def text_file(folder):
    (folder / "m.keras").write_text("not a model")
    return folder / "m.keras"


def empty_file(folder):
    (folder / "m.keras").touch()
    return folder / "m.keras"


def cut(write, kept):
    """A file that ends too early."""

    def cut(folder):
        path = write(folder)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * kept)])
        return path

    return cut


def scrambled(folder):
    """A compressed archive whose weights do not inflate."""
    path = MODELS["compressed"](folder)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("model.weights.h5").header_offset + 60
    content[start : start + 200] = b"\xff" * 200
    path.write_bytes(content)
    return path


def linked(link):
    """A file whose ledger lies in another place."""

    def linked(folder):
        write_weights(folder / "other.h5")
        with h5py.File(write_weights(folder / "m.h5", None), "a") as file:
            link(file, folder / "other.h5")
        return folder / "m.h5"

    return linked


def link_dataset(file, other):
    file[LEDGER_NAME] = h5py.ExternalLink(str(other), LEDGER_NAME)


def link_softly(file, other):
    file["elsewhere"] = np.frombuffer(LEDGER.to_json().encode(), np.uint8)
    file[LEDGER_NAME] = h5py.SoftLink("/elsewhere")


def store_outside(file, other):
    size = other.stat().st_size
    file.create_dataset(LEDGER_NAME, (size,), np.uint8, external=[(str(other), 0, size)])


def be_virtual(file, other):
    layout = h5py.VirtualLayout((4,), np.uint8)
    layout[:] = h5py.VirtualSource(str(other), LEDGER_NAME, (4,))
    file.create_virtual_dataset(LEDGER_NAME, layout)


def stores(value):
    """A file with something else in the ledger's place."""

    def stores(folder):
        with h5py.File(folder / "m.h5", "w") as file:
            file[LEDGER_NAME] = value
        return folder / "m.h5"

    return stores


def damaged(document):
    return lambda folder: write_weights(folder / "m.h5", document)


def huge(folder):
    """Declares more than any ledger has, without taking the room."""
    with h5py.File(folder / "m.h5", "w") as file:
        file.create_dataset(LEDGER_NAME, (1 << 40,), np.uint8, chunks=(1 << 16,))
    return folder / "m.h5"


def is_group(folder):
    with h5py.File(folder / "m.h5", "w") as file:
        file.create_group(LEDGER_NAME)
    return folder / "m.h5"


def bomb(folder):
    """An archive that claims to inflate to more than it may."""
    path = MODELS["compressed"](folder)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("model.weights.h5").file_size.to_bytes(4, "little")
    path.write_bytes(content.replace(size, b"\xff\xff\xff\x7f"))
    return path


DOCUMENT = LEDGER.to_json().encode()
BAD_FILES = {
    "missing": (lambda folder: folder / "m.keras", "No such file"),
    "folder": (lambda folder: folder, "directory"),
    "text": (text_file, "is no model file: give a `.keras`"),
    "empty": (empty_file, "is no model file"),
    "other archive": (
        lambda folder: write_archive(folder / "m.zip", write_weights(folder / "w"), member="a.h5"),
        "there is no model.weights.h5 in it",
    ),
    "archive of text": (lambda folder: write_archive(folder / "m.keras", text_file(folder)), "damaged"),
    "half an archive": (cut(MODELS["stored"], 0.5), "damaged"),
    "half of the weights": (cut(MODELS["weights"], 0.5), "damaged"),
    "scrambled": (scrambled, "damaged"),
    "bomb": (bomb, "compressed in a way that is not read here"),
    "no ledger": (damaged(None), "holds no ledger: it was not saved by a private model"),
    "external link": (linked(link_dataset), "damaged"),
    "soft link": (linked(link_softly), "damaged"),
    "external storage": (linked(store_outside), "damaged"),
    "virtual": (linked(be_virtual), "damaged"),
    "group for a ledger": (is_group, "damaged"),
    "text for bytes": (stores("{}"), "damaged"),
    "floats for bytes": (stores(np.zeros(3)), "damaged"),
    "matrix for bytes": (stores(np.zeros((3, 3), np.uint8)), "damaged"),
    "huge": (huge, "more than 16,777,216 bytes"),
    "no bytes": (damaged(b""), "damaged"),
    "not text": (damaged(b"\xff\xfe\x00"), "damaged"),
    "not JSON": (damaged(DOCUMENT[:-5]), "damaged"),
    "deep": (damaged(b"[" * 100_000), "damaged"),
    "other JSON": (damaged(b"[1, 2]"), "damaged"),
    "negative steps": (damaged(DOCUMENT.replace(b"39000", b"-39000")), "damaged"),
    "not a number": (damaged(DOCUMENT.replace(b"39000", b"NaN")), "damaged"),
    "endless steps": (damaged(DOCUMENT.replace(b"39000", b"9" * 400)), "damaged"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.filterwarnings("error")
def test_bad_files_are_refused_in_one_line_with_status_1(run, tmp_path, kind):
    make, words = BAD_FILES[kind]
    path = make(tmp_path)
    assert_fails(run("statement", path), 1, words, str(path))


@pytest.mark.parametrize("kind", MODELS)
def test_damaged_bytes_give_a_ledger_or_a_clear_error(kind, tmp_path):
    rng = np.random.default_rng(0)
    path = MODELS[kind](tmp_path)
    sound = np.frombuffer(path.read_bytes(), np.uint8)
    for _ in range(50):
        content = sound.copy()
        content[rng.integers(content.size, size=20)] = rng.integers(256, size=20)
        path.write_bytes(content[: rng.integers(content.size // 2, 2 * content.size)].tobytes())
        try:
            assert isinstance(cli.read_ledger(path), Ledger)
        except cli.LedgerError as error:
            assert str(path) in str(error)


def test_reads_little_of_a_stored_archive(model, monkeypatch):
    """Large models take no longer: weights are passed over."""
    with h5py.File(model.with_name("w"), "w") as file:
        file["layers/embedding/vars/0"] = np.zeros(1 << 20)
        file[LEDGER_NAME] = np.frombuffer(DOCUMENT, np.uint8)
    write_archive(model, model.with_name("w"))
    count = []
    readinto = cli._Window.readinto
    monkeypatch.setattr(cli._Window, "readinto", lambda *a: count.append(readinto(*a)) or count[-1])
    assert cli.read_ledger(model) == LEDGER
    assert 0 < sum(count) < 1 << 17


# Without TensorFlow.


def test_command_starts_without_tensorflow_or_keras(model):
    code = f"""
import sys
from dp2_keras import cli
assert cli.main(["statement", {str(model)!r}]) == 0
assert cli.main("epsilon {IMDB} --noise-multiplier 1".split()) == 0
print(sorted({{"tensorflow", "keras"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "line, status", [(f"epsilon {IMDB} --noise-multiplier 1", 0), ("statement no.keras", 1), ("", 2)]
)
def test_module_runs_as_a_command(line, status):
    command = [sys.executable, "-m", "dp2_keras.cli", *line.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == status
    assert (result.stdout if status == 0 else result.stderr).count("epsilon = 3.03051") == (status == 0)
    assert "Traceback" not in result.stderr
