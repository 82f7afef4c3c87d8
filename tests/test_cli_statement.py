"""`dp2 statement` reads the ledger of a file, without trusting the file and without TensorFlow."""

import json
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest
from test_cli import IMDB, LEDGER, MECHANISM, assert_fails

from dp2_keras import cli
from dp2_keras.entries import Entry, UnknownSampling
from dp2_keras.ledger import LEDGER_NAME, Ledger
from dp2_keras.statement import statement


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
