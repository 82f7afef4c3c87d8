"""The fit log is the one that plain Keras prints, and three diagnostics beside it.

DP-SGD without clip and noise is Keras's SGD, so that both see the same weights.
"""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
import zoo
from conftest import fit_in_order, flat_weights, logistic_model
from keras import layers
from zoo import KINDS, filled, take

import dp2_keras as dp2

DIAGNOSTICS = {"phase", "clipped_fraction", "scaled_norm"}
BATCH, RATE = 4, 0.1
FEATURES = KINDS["dense"].x[:8]
LABELS = (KINDS["dense"].y[:8, :1] > 0).astype(np.float32)
WEIGHTS = np.linspace(0.0, 3.0, 8).astype(np.float32)
BINARY = keras.losses.BinaryCrossentropy(from_logits=True)


def classifier():
    return keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(1)])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


def binary(**arguments):
    """Arguments of `compile`; metrics have state, so that each model gets its own."""
    return dict(loss=BINARY, metrics=[keras.metrics.BinaryAccuracy(threshold=0.0), "mae"], **arguments)


def pair(build, x, compile_arguments, rate=RATE):
    """A plain and a private model of equal weights."""
    plain, ours = filled(build(), x), dp2.make_private(filled(build(), x))
    plain.compile(keras.optimizers.SGD(rate), **compile_arguments())
    ours.compile(dp2.DPSGD(rate, np.inf, 0.0, expected_batch_size=BATCH), **compile_arguments())
    return plain, ours


def assert_equal_logs(ours, plain):
    """`ours` is `plain` and the diagnostics, and what `fit` has spent."""
    assert set(ours) - set(plain) - {"epsilon"} == DIAGNOSTICS
    for key in plain:
        np.testing.assert_allclose(ours[key], plain[key], rtol=2e-5, atol=1e-6, err_msg=key)


def assert_equal_fits(build, x, y, compile_arguments, rate=RATE, epochs=2, **fit_arguments):
    logs = []
    for model in pair(build, x, compile_arguments, rate):
        logs.append(fit_in_order(model, x, y, batch_size=BATCH, epochs=epochs, **fit_arguments).history)
    assert_equal_logs(logs[1], logs[0])
    return logs[0]


each_build = pytest.mark.parametrize("build", [classifier, Subclassed])


@pytest.mark.parametrize(
    "build, execution",
    [(classifier, dict()), (classifier, dict(run_eagerly=True)), (classifier, dict(jit_compile=True)),
     (classifier, dict(steps_per_execution=2)), (Subclassed, dict()), (Subclassed, dict(run_eagerly=True))],
)  # fmt: skip
def test_losses_and_metrics_however_the_step_is_executed(build, execution):
    log = assert_equal_fits(build, FEATURES, LABELS, lambda: binary(**execution))
    assert set(log) == {"loss", "binary_accuracy", "mae"}


def test_the_loss_alone():
    assert set(assert_equal_fits(classifier, FEATURES, LABELS, lambda: dict(loss=BINARY))) == {"loss"}


@each_build
def test_weighted_metrics_and_sample_weights(build):
    weighted = lambda: binary(weighted_metrics=[keras.metrics.MeanSquaredError(name="mse")])  # noqa: E731
    log = assert_equal_fits(build, FEATURES, LABELS, weighted, sample_weight=WEIGHTS)
    assert set(log) == {"loss", "binary_accuracy", "mae", "mse"}


def test_class_weights():
    weighted = lambda: binary(weighted_metrics=["mse"])  # noqa: E731
    assert_equal_fits(classifier, FEATURES, LABELS, weighted, class_weight={0: 0.25, 1: 2.0})


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size"])
def test_loss_reductions(reduction):
    # Keras's gradient is the sum's under "sum", hence the same weights only at rate 0.
    loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction)
    assert_equal_fits(classifier, FEATURES, LABELS, lambda: dict(loss=loss), rate=0.0)


@pytest.mark.parametrize("build, rows", [(classifier, 3), (classifier, 5), (Subclassed, 5)])
def test_a_smaller_last_batch_weighs_less(build, rows):
    # Keras divides the last batch by its own size, hence one epoch.
    arguments = dict(epochs=1, sample_weight=WEIGHTS[:rows])
    weighted = lambda: binary(weighted_metrics=["mse"])  # noqa: E731
    assert_equal_fits(build, FEATURES[:rows], LABELS[:rows], weighted, **arguments)


@each_build
def test_validation_data(build):
    held_out = (FEATURES[:3] + 1, LABELS[:3], WEIGHTS[:3])
    log = assert_equal_fits(build, FEATURES, LABELS, binary, validation_data=held_out)
    assert {"val_loss", "val_binary_accuracy", "val_mae"} <= set(log)


def test_validation_split():
    x, y = np.concatenate([FEATURES] * 2)[:12], np.concatenate([LABELS] * 2)[:12]
    assert "val_loss" in assert_equal_fits(classifier, x, y, binary, validation_split=1 / 3)


def two_outputs():
    x = keras.Input((5,))
    hidden = layers.Dense(3, "tanh")(x)
    return keras.Model(x, {"u": layers.Dense(1, name="u")(hidden), "v": layers.Dense(2, name="v")(hidden)})


TWO_LABELS = {"u": LABELS, "v": KINDS["dense"].y[:8]}


def two_losses(**arguments):
    return dict(loss={"u": BINARY, "v": "mse"}, metrics={"u": ["mae"], "v": ["mae", "mape"]}, **arguments)


@pytest.mark.parametrize("more", [dict(), dict(loss_weights={"u": 0.5, "v": 2.0})], ids=str)
def test_two_outputs_with_losses_and_metrics_by_name(more):
    log = assert_equal_fits(two_outputs, FEATURES, TWO_LABELS, lambda: two_losses(**more))
    assert {"u_loss", "v_loss", "u_mae", "v_mae"} <= set(log)


@pytest.mark.parametrize("execution", [dict(), dict(run_eagerly=True)], ids=str)
def test_two_outputs_and_a_smaller_last_batch(execution):
    labels = take(TWO_LABELS, slice(0, 5))
    assert_equal_fits(two_outputs, FEATURES[:5], labels, lambda: two_losses(**execution), epochs=1)


def test_two_outputs_with_sample_weights_by_name():
    weighted = lambda: two_losses(weighted_metrics={"u": ["mse"], "v": ["mse"]})  # noqa: E731
    weights = {"u": WEIGHTS, "v": WEIGHTS[::-1].copy()}
    assert_equal_fits(two_outputs, FEATURES, TWO_LABELS, weighted, sample_weight=weights)


def regularized():
    l2 = keras.regularizers.L2(0.1)
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, "tanh", kernel_regularizer=l2, bias_regularizer=l2),
         layers.Dense(1, kernel_regularizer=keras.regularizers.L1(0.05))]
    )  # fmt: skip


def test_weight_regularisers_are_part_of_the_loss():
    arguments = dict(validation_data=(FEATURES, LABELS))
    log = assert_equal_fits(regularized, FEATURES, LABELS, binary, **arguments)
    without = assert_equal_fits(classifier, FEATURES, LABELS, binary, rate=0.0)
    assert log["loss"][0] > without["loss"][0] + 0.1


def tagger():
    return keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(7, 2, mask_zero=True), layers.Dense(1)]
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_masked_sequences(weighted):
    # The mean over a batch's true steps is not the mean of its examples' means: rate 0.
    tokens, tags = KINDS["masked"].x[:8], zoo.normal(8, 3, 1)
    arguments = dict(loss="mse", metrics=["mae"], weighted_metrics=["mape"])
    weights = dict(sample_weight=np.outer(WEIGHTS, [1, 2, 3]).astype(np.float32)) if weighted else {}
    assert_equal_fits(tagger, tokens, tags, lambda: dict(arguments), rate=0.0, **weights)


class OwnLoss:
    """A `compute_loss` that also keeps a metric of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=None):
        self.error.update_state(tf.abs(y - y_pred), sample_weight=sample_weight)
        return tf.reduce_mean(tf.square(y - y_pred))


class OwnLossPlain(OwnLoss, Subclassed):
    def __init__(self):
        super().__init__()
        self.error = keras.metrics.Mean(name="error")


class OwnLossPrivate(OwnLoss, dp2.DP2Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(1)
        self.error = keras.metrics.Mean(name="error")

    call = Subclassed.call


@pytest.mark.parametrize(
    "compiled, validation", [(dict(), False), (dict(metrics=["mse"]), True)], ids=["alone", "with_metrics"]
)
@pytest.mark.parametrize("build", [OwnLossPlain, OwnLossPrivate])
def test_a_compute_loss_with_a_metric_of_its_own(build, compiled, validation):
    arguments = dict(batch_size=BATCH, epochs=2)
    if validation:
        arguments["validation_data"] = (FEATURES[:3], LABELS[:3])
    plain, ours = filled(OwnLossPlain(), FEATURES), dp2.make_private(filled(build(), FEATURES))
    plain.compile(keras.optimizers.SGD(RATE), **compiled)
    ours.compile(dp2.DPSGD(RATE, np.inf, 0.0), **compiled)
    logs = [fit_in_order(model, FEATURES, LABELS, **arguments).history for model in (plain, ours)]
    assert "error" in logs[0]
    assert_equal_logs(logs[1], logs[0])


@pytest.mark.parametrize(
    "build, compiled, execution",
    [
        (classifier, binary, dict()),
        (classifier, binary, dict(run_eagerly=True)),
        (two_outputs, two_losses, dict()),
        (two_outputs, two_losses, dict(jit_compile=True)),
        (OwnLossPlain, dict, dict()),
    ],
)
def test_an_empty_batch_counts_for_nothing(build, compiled, execution):
    y = TWO_LABELS if build is two_outputs else LABELS

    def batches(sizes):
        for start, stop in sizes:
            yield take(FEATURES, slice(start, stop)), take(y, slice(start, stop))

    spec = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), (FEATURES, y))
    logs = []
    for sizes in ([(0, 4), (4, 8)], [(0, 0), (0, 4), (0, 0), (4, 8), (0, 0)]):
        _, ours = pair(build, FEATURES, lambda: dict(compiled(), **execution))
        data = tf.data.Dataset.from_generator(lambda s=sizes: batches(s), output_signature=spec)
        logs.append(ours.fit(data, dataset_size=8, verbose=0).history)
    for key in logs[0]:
        np.testing.assert_allclose(logs[1][key], logs[0][key], rtol=1e-5, err_msg=key)


@each_build
def test_train_and_test_on_batch(build):
    plain, ours = pair(build, FEATURES, binary)
    batch = (FEATURES[:BATCH], LABELS[:BATCH])
    assert_equal_logs(*[m.train_on_batch(*batch, return_dict=True) for m in (ours, plain)])
    numbers = [m.train_on_batch(*batch) for m in (ours, plain)]
    np.testing.assert_allclose(numbers[0][:3], numbers[1], rtol=2e-5)
    np.testing.assert_allclose(*[m.test_on_batch(*batch) for m in (ours, plain)], rtol=2e-5)


@pytest.mark.parametrize(
    "build, labels, compile_arguments",
    [(classifier, LABELS, binary), (Subclassed, LABELS, binary), (two_outputs, TWO_LABELS, two_losses)],
)
def test_evaluate_and_predict(build, labels, compile_arguments):
    plain, ours = pair(build, FEATURES, compile_arguments)
    results = [m.evaluate(FEATURES, labels, verbose=0, return_dict=True) for m in (ours, plain)]
    assert set(results[0]) == set(results[1])
    for key, value in results[1].items():
        np.testing.assert_allclose(results[0][key], value, rtol=1e-5, err_msg=key)
    np.testing.assert_allclose(*[m.evaluate(FEATURES, labels, verbose=0) for m in (ours, plain)], rtol=1e-5)
    predictions = [tf.nest.flatten(m.predict(FEATURES, verbose=0)) for m in (ours, plain)]
    for our, expected in zip(*predictions):
        np.testing.assert_allclose(our, expected, rtol=1e-5)


def test_evaluation_after_training():
    plain, ours = pair(classifier, FEATURES, binary)
    for model in (plain, ours):
        fit_in_order(model, FEATURES, LABELS, batch_size=BATCH, epochs=2)
    results = [m.evaluate(FEATURES, LABELS, verbose=0, return_dict=True) for m in (ours, plain)]
    assert set(results[0]) == set(results[1])
    np.testing.assert_allclose(list(results[0].values()), list(results[1].values()), rtol=1e-5)


# Diagnostics.

SGD_CLIP, CLIP, EPS = 1.5, 6.0, 0.05


def logistic_regression(**compile_arguments):
    optimizer = dp2.DP2RMSprop(
        0.05, CLIP, 0.0, delay=1, sgd_learning_rate=0.3, sgd_l2_norm_clip=SGD_CLIP, eps=EPS,
        expected_batch_size=BATCH,
    )  # fmt: skip
    return logistic_model(5, optimizer, **compile_arguments)


X, TARGETS = zoo.normal(10, 5) * np.array([0.1, 0.3, 1, 2, 4], np.float32), zoo.integers_below(2, 10)
FIT = dict(batch_size=BATCH, sampling="shuffle", shuffle=False, verbose=0)
BATCHES = [np.arange(0, 4), np.arange(4, 8), np.arange(8, 10)]


@pytest.mark.parametrize(
    "execution",
    [dict(), dict(run_eagerly=True), dict(jit_compile=True), dict(steps_per_execution=2),
     dict(physical_batch_size=3), dict(method="loop")],
    ids=str,
)  # fmt: skip
def test_diagnostics_equal_their_definitions(execution):
    model = logistic_regression(**execution)
    log = model.fit(X, TARGETS.astype(np.float32), **FIT).history
    gradients = oracle.logistic_gradients(X, TARGETS)
    path = oracle.dp2(
        gradients, np.zeros(6), BATCHES, rule="rmsprop", s1=1, s2=1, lr=0.05, lr_sgd=0.3, clip_norm=CLIP,
        clip_sgd=SGD_CLIP, eps=EPS, batch_size=BATCH,
    )  # fmt: skip
    first_mean = sum(oracle.clip(g, SGD_CLIP) for g in gradients(path[0], BATCHES[0])) / BATCH
    scales = [1.0, 1 / (np.sqrt(0.1 * first_mean**2) + EPS), 1.0]
    norms = [
        np.linalg.norm(scale * gradients(w, rows), axis=1) for scale, w, rows in zip(scales, path, BATCHES)
    ]
    clipped = [n > clip for n, clip in zip(norms, (SGD_CLIP, CLIP, SGD_CLIP))]
    assert 0 < np.mean(np.concatenate(clipped)) < 1
    np.testing.assert_allclose(log["phase"], [1 / 3], rtol=1e-6)
    np.testing.assert_allclose(log["clipped_fraction"], [np.mean(np.concatenate(clipped))], rtol=1e-6)
    np.testing.assert_allclose(log["scaled_norm"], [np.mean(np.concatenate(norms))], rtol=1e-5)


def test_diagnostics_start_anew_with_each_epoch():
    log = logistic_regression().fit(X, TARGETS, epochs=4, **FIT).history
    np.testing.assert_allclose(log["phase"], [1 / 3, 2 / 3, 1 / 3, 2 / 3], rtol=1e-6)


def test_diagnostics_can_be_switched_off():
    model = logistic_regression(diagnostics=False, metrics=["mae"])
    assert set(model.fit(X, TARGETS, **FIT).history) == {"loss", "mae", "epsilon"}


def test_diagnostics_change_no_weight():
    models = [logistic_regression(diagnostics=diagnostics) for diagnostics in (True, False)]
    for model in models:
        model.fit(X, TARGETS, epochs=2, **FIT)
    np.testing.assert_array_equal(*[flat_weights(model) for model in models])


@pytest.mark.parametrize("build", [classifier, Subclassed, two_outputs])
def test_validation_has_no_diagnostics(build):
    y, compiled = (TWO_LABELS, two_losses) if build is two_outputs else (LABELS, binary)
    _, ours = pair(build, FEATURES, compiled)
    log = ours.fit(FEATURES, y, validation_data=(FEATURES, y), epochs=2, **FIT).history
    assert set(log) >= DIAGNOSTICS
    assert not {f"val_{key}" for key in DIAGNOSTICS} & set(log)
    assert not DIAGNOSTICS & set(ours.evaluate(FEATURES, y, verbose=0, return_dict=True))
