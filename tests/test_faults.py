"""Files that are torn, damaged or made up: each is refused, and none runs code or forgets a step."""

import io
import json
import zipfile

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import saved
import tensorflow as tf

import dp2_keras as dp2
from dp2_keras.schedule import DelayedSchedule

X = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]


def trained():
    model = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dp2.DP2RMSprop(0.1, 1.0, noise_multiplier=1.0, delay=2), loss="mse")
    model.fit(X, X, batch_size=10, epochs=2, verbose=0)
    return model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model in each format that has room for its ledger, by the ending of its name."""
    directory, model = tmp_path_factory.mktemp("files"), trained()
    model.save(directory / "model.keras")
    model.save_weights(directory / "model.weights.h5")
    return {path.name.partition(".")[2]: path.read_bytes() for path in directory.iterdir()}


def loaded(tmp_path, ending, data):
    path = tmp_path / f"damaged.{ending}"
    path.write_bytes(data)
    if ending == "keras":
        return keras.models.load_model(path)
    model = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dp2.DP2RMSprop(0.1, 1.0, noise_multiplier=1.0, delay=2), loss="mse")
    model.load_weights(path)
    return model


@pytest.mark.parametrize("ending", ["keras", "weights.h5"])
def test_an_undamaged_file_has_the_ledger(files, tmp_path, ending):
    assert loaded(tmp_path, ending, files[ending]).ledger.steps == 8


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("ending", ["keras", "weights.h5"])
def test_a_torn_file_is_refused(files, tmp_path, ending, share):
    data = files[ending]
    with pytest.raises((OSError, ValueError, KeyError, zipfile.BadZipFile)):
        loaded(tmp_path, ending, data[: int(share * len(data))])


def test_a_damaged_ledger_is_refused_whichever_byte_it_is(files, tmp_path):
    data = files["weights.h5"]
    start, end = data.index(b'{"version"'), data.index(b"]}", data.index(b'{"version"')) + 2
    for place in range(start, end, 7):
        with pytest.raises(ValueError, match="ledger .*cannot be trusted"):
            loaded(tmp_path, "weights.h5", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


@pytest.mark.parametrize("member", ["config.json", "model.weights.h5"])
def test_a_damaged_model_file_is_refused(files, tmp_path, member):
    """A `.keras` file is a zip file, which has check sums of its own."""
    data = files["keras"]
    part = zipfile.ZipFile(io.BytesIO(data)).getinfo(member)
    place = part.header_offset + 30 + len(member) + part.compress_size // 2
    with pytest.raises((ValueError, OSError, KeyError, TypeError, zipfile.BadZipFile)):
        loaded(tmp_path, "keras", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


def test_a_damaged_checkpoint_is_refused(tmp_path):
    model = trained()
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "checkpoint"))
    file = tmp_path / "checkpoint.data-00000-of-00001"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    other = trained()
    with pytest.raises(tf.errors.OpError, match="(?i)checksum"):
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path).assert_consumed()


def with_config(data, change):
    """A `.keras` file with another `config.json`."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "config.json":
                config = json.loads(content)
                change(config)
                content = json.dumps(config).encode()
            new.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize("argument", ["learning_rate", "noise_multiplier", "l2_norm_clip", "name"])
def test_a_file_that_names_code_does_not_run_it(files, tmp_path, argument):
    trace = tmp_path / "trace"
    code = {
        "module": "subprocess",
        "class_name": "check_call",
        "config": {"args": ["touch", str(trace)]},
        "registered_name": None,
    }

    def change(config):
        config["compile_config"]["optimizer"]["config"][argument] = code

    with pytest.raises((ValueError, TypeError)):
        loaded(tmp_path, "keras", with_config(files["keras"], change))
    assert not trace.exists()


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["class_name", "config", "module"]), st.text(max_size=5), max_size=3),
)


@pytest.mark.parametrize("name", saved.OPTIMIZERS)
def test_a_made_up_config_is_refused_or_is_what_it_says(name):
    config = saved.optimizer_of(name).get_config()

    @hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
    @hypothesis.given(st.sampled_from(sorted(config)), VALUES)
    def check(argument, value):
        changed = {**config, argument: value}
        try:
            made = type(saved.optimizer_of(name)).from_config(changed)
        except (ValueError, TypeError, OverflowError):
            return
        found = made.get_config()[argument]
        assert value == value, "Not a number is no argument."
        same = found == value or (argument == "name" and not value)
        assert same or float(found) == pytest.approx(float(value), rel=1e-6)

    check()


@pytest.mark.parametrize("step", [10**6, 2**31 - 1, 2**31, 2**40])
def test_phases_do_not_overflow(step):
    schedule = DelayedSchedule(sgd_steps=3, adaptive_steps=4)
    steps = tf.range(step, step + 14, dtype=tf.int64)
    found = tf.function(schedule.is_adaptive)(steps).numpy()
    assert list(found) == [(step + k) % 7 >= 3 for k in range(14)]


def test_a_counter_goes_on_beyond_32_bits():
    model = trained()
    counter = model.optimizer.iterations
    counter.assign(2**31 - 2)
    model.fit(X, X, batch_size=10, verbose=0)
    assert int(counter) == 2**31 + 2
    assert int(model.optimizer.phase()) == ((2**31 + 2) % 4 >= 2)


@pytest.mark.parametrize("rows", [np.zeros((0, 1), np.float32), []])
def test_no_data_is_refused(rows):
    model = trained()
    with pytest.raises(ValueError):
        model.fit(rows, rows, batch_size=10, verbose=0)
    assert model.ledger.steps == 8
