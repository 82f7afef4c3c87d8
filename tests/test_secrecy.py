"""The noise key stays in the process: it is searched for wherever a run leaves something.

For each place, a second test plants the key there and sees it found, so that a search that
finds nothing means something.
"""

import base64
import contextlib
import io
import pickle
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_encoding

import dp2_keras as dp2

KERAS_3 = hasattr(keras, "StatelessScope")
FEATURES, BATCH = 4, 4  # A kernel of four floats has the size of a key.


def dp2_rmsprop(**changes):
    arguments = dict(
        learning_rate=0.05, l2_norm_clip=1.5, noise_multiplier=0.7, delay=2, expected_batch_size=BATCH
    )
    return dp2.DP2RMSprop(**{**arguments, **changes})


def compiled(optimizer=None):
    layers = [keras.Input((FEATURES,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = dp2.DP2Sequential(layers, name="net")
    model.compile(optimizer=optimizer or dp2_rmsprop(), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def examples():
    x = np.random.default_rng(0).normal(size=(3 * BATCH, FEATURES)).astype(np.float32)
    return x, x[:, :1]


def fit(model, **arguments):
    arguments = {**dict(batch_size=BATCH, verbose=0), **arguments}
    return model.fit(*examples(), **arguments)


def key_of(thing):
    """The key of a model, an optimizer or a source, two uint64."""
    thing = getattr(thing, "optimizer", thing)
    return getattr(thing, "_noise_source", thing)._key.numpy()


# The search.


def spellings(key):
    """All the ways in which a key may stand in a file: what to search for."""
    for words in ([*key], [*key[::-1]], *[[half] for half in key]):
        for order in ("<u8", ">u8"):
            data = np.array(words, order).tobytes()
            yield data
            yield data.hex().encode()
            yield base64.b64encode(data).rstrip(b"=")[:-1]  # The last letter depends on what follows.
            yield text_encoding.CEscape(data, as_utf8=False).encode()
    for half in key:
        for number in (int(half), int(half.astype(np.int64))):
            yield str(number).encode()
            yield f"{abs(number):x}".encode()
        yield varint(int(half))


def varint(number):
    """How protocol buffers write an integer."""
    groups = [(number >> shift) & 127 for shift in range(0, 64, 7) if number >> shift]
    return bytes([group | 128 for group in groups[:-1]] + groups[-1:])


def contains(data, key):
    """Whether the key is in some bytes, or in a zip archive that they hold."""
    data = data.encode() if isinstance(data, str) else data
    chunks = [data, data.lower()]
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            chunks += [archive.read(name) for name in archive.namelist()]
    return any(spelling in chunk for spelling in spellings(key) for chunk in chunks)


KEY = np.array([0x0123456789ABCDEF, 0xFEDCBA9876543210], np.uint64)


@pytest.mark.parametrize(
    "write",
    [
        lambda key: key.tobytes(),
        lambda key: key.byteswap().tobytes(),
        lambda key: key[:1].tobytes(),
        lambda key: key[1:].tobytes(),
        lambda key: str(key),
        lambda key: repr(key.tolist()),
        lambda key: str(int(key[0])),
        lambda key: str(int(key[1])),
        lambda key: str(key.astype(np.int64)),
        lambda key: hex(int(key[0])),
        lambda key: hex(int(key[1])).upper(),
        lambda key: key.tobytes().hex(),
        lambda key: base64.b64encode(key.tobytes()),
        lambda key: pickle.dumps(key),
        lambda key: pickle.dumps(key.tolist()),
        lambda key: tf.make_tensor_proto(key).SerializeToString(),
        lambda key: str(tf.make_tensor_proto(key)),
        lambda key: tf.make_tensor_proto(key[0]).SerializeToString(),
        lambda key: tf.make_tensor_proto(key[1]).SerializeToString(),
        lambda key: str(tf.make_tensor_proto(key[1])),
        lambda key: tf.io.serialize_tensor(key).numpy(),
        lambda key: zipped(key.tobytes()),
        lambda key: zipped(str(key).encode()),
    ],
)
def test_the_search_finds_every_spelling(write):
    written = write(KEY)
    noise = written[:0] + ("ä?" * 50 if isinstance(written, str) else bytes(range(256)))
    assert contains(written, KEY)
    assert contains(noise + written + noise, KEY)
    assert not contains(noise, KEY)
    assert not contains(write(KEY ^ np.uint64(0x5555555555555555)), KEY)


def zipped(data):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("member", data)
    return buffer.getvalue()


# The places. Each is a function of a trained model and an empty folder that leaves traces
# in the folder, or returns them.


def keras_file(model, path):
    model.save(path / "model.keras")


def weights_file(model, path):
    model.save_weights(path / "model.weights.h5")


def hdf5_file(model, path):
    model.save(path / "model.h5")


def checkpoint(model, path):
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(path / "ckpt"))


def backup(model, path):
    fit(model, callbacks=[keras.callbacks.BackupAndRestore(str(path), delete_checkpoint=False)])


def exported(model, path):
    model.export(str(path / "exported"))


def saved_model(model, path):
    if KERAS_3:
        tf.saved_model.save(model, str(path))
    else:
        model.save(path, save_format="tf")


def pickled_model(model, path):
    return [pickle.dumps(model)]


def pickled_optimizer(model, path):
    return [pickle.dumps(model.optimizer)]


def pickled_source(model, path):
    return [pickle.dumps(model.optimizer._noise_source, protocol) for protocol in range(6)]


def texts(model, path):
    optimizer = model.optimizer
    source = optimizer._noise_source
    return [
        *(f(thing) for f in (str, repr) for thing in (optimizer, model, source)),
        str(vars(optimizer)),
        str(optimizer.get_config()),
        str(keras.saving.serialize_keras_object(optimizer)),
        str(model.get_config()),
        str(model.get_compile_config()),
        model.to_json(),
    ]


def train_step_graph(model, path):
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    graph = step.get_concrete_function(tf.TensorSpec([None, FEATURES]), tf.TensorSpec([None, 1])).graph
    graph_def = graph.as_graph_def()  # With the functions that it calls.
    nodes = [*graph_def.node, *(node for f in graph_def.library.function for node in f.node_def)]
    assert any(node.op == "StatelessRandomUniformFullIntV2" for node in nodes)
    return [graph_def.SerializeToString(), str(graph_def)]


def tensorboard_logs(model, path):
    model.train_function = None  # Traced again, so that it is logged.
    fit(
        model,
        callbacks=[keras.callbacks.TensorBoard(str(path), write_graph=True, write_steps_per_second=True)],
    )


FILES = [keras_file, weights_file, checkpoint, backup, exported, pickled_model]
FILES += [pickled_optimizer] if KERAS_3 else [saved_model]  # Each Keras lacks the other's.
GRAPHS = [train_step_graph, tensorboard_logs]


def name_of(value):
    return getattr(value, "__name__", None)


def found(leave, model, path, key):
    """Whether the key is in what `leave` leaves."""
    traces = list(leave(model, path) or [])
    traces += [file.read_bytes() for file in path.rglob("*") if file.is_file()]
    assert any(len(trace) > 20 for trace in traces)
    return any(contains(trace, key) for trace in traces)


@pytest.mark.parametrize("leave", [*FILES, hdf5_file, pickled_source, texts, *GRAPHS], ids=name_of)
def test_the_key_is_nowhere(tmp_path, leave):
    model = compiled()
    fit(model)
    key = key_of(model)
    assert not found(leave, model, tmp_path, key)
    np.testing.assert_array_equal(key_of(model), key)  # It was this key all the time.


def plant_in_variables(model):
    """As if the key were saved with the weights and the optimizer's state.

    A key whose bytes are ordinary numbers: training would not leave those of NaN as they are.
    """
    ordinary = np.float32([0.1, 0.7, 1.3, 2.9]).tobytes()
    model.optimizer._noise_source._key.assign(np.frombuffer(ordinary, np.uint64))
    kernel, bias = model.get_weights()
    model.set_weights([np.frombuffer(key_of(model).tobytes(), np.float32).reshape(kernel.shape), bias])
    model.optimizer._second_moments[0].assign(model.get_weights()[0])
    model.optimizer.learning_rate = 0.0  # The weights stay as they are.


def plant_in_graph(model):
    """As if the key were a tensor: TensorFlow writes small ones into the graph."""
    source = model.optimizer._noise_source
    source._key = tf.constant(source._key.numpy())


def plant_in_config(model):
    """As if the key were a piece of configuration."""
    model.optimizer.name = f"key{int(key_of(model)[1])}"


@pytest.mark.parametrize(
    "leave, plant",
    [(leave, plant_in_variables) for leave in [*FILES, hdf5_file]]
    # Keras 3's TensorBoard callback draws the layers, not the train function.
    + [(leave, plant_in_graph) for leave in (GRAPHS[:1] if KERAS_3 else GRAPHS)]
    + [(leave, plant_in_config) for leave in [texts, keras_file, hdf5_file, pickled_model]],
    ids=name_of,
)
def test_a_planted_key_is_found(tmp_path, leave, plant):
    model = compiled()
    plant(model)
    assert found(leave, model, tmp_path, key_of(model))


def test_the_key_is_not_in_what_training_prints(capfd, caplog):
    model = compiled()
    with caplog.at_level("DEBUG"):
        history = fit(model, epochs=2, verbose=2)
        model.summary()
        print(model.optimizer, model.optimizer._noise_source, history.history)
        with contextlib.suppress(dp2.NonPrivateUpdateError):
            model.optimizer.apply_gradients([(tf.ones_like(v), v) for v in model.trainable_variables])
    printed = capfd.readouterr()
    assert "loss" in printed.out
    for text in (printed.out, printed.err, caplog.text):
        assert not contains(text, key_of(model))


def test_no_variable_that_keras_or_tensorflow_knows_holds_the_key(tmp_path):
    model = compiled()
    fit(model)
    known = [*model.variables, *model.optimizer.variables]
    assert not [v for v in known if "uint64" in str(v.dtype)]
    assert not [v for v in known if contains(np.asarray(v).tobytes(), key_of(model))]
    checkpoint(model, tmp_path)
    saved = tf.train.list_variables(str(tmp_path))
    assert len(saved) > len(model.weights)
    assert not [name for name, _ in saved if "noise" in name or "key" in name or "draws" in name]
