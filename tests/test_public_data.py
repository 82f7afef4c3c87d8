"""Public data: what a step makes of it, that private data never meets it, and that it is kept nowhere."""

import itertools
import json
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from conftest import flat_weights, logistic_model

import dp2_keras as dp2
from dp2_keras.entries import Mechanism, UnknownSampling
from dp2_keras.ledger import Ledger
from dp2_keras.noise import NoiseSource
from dp2_keras.public_data import PublicData, PublicGradients

FEATURES = 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, FEATURES)).astype(np.float32)
Y = (X[:, :1] > 0).astype(np.float32)
PUBLIC = RNG.normal(size=(6, FEATURES)).astype(np.float32), np.float32([[0], [1]] * 3)


def adadps(**changes):
    arguments = dict(learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=0.5, expected_batch_size=8)
    return dp2.AdaDPSRMSprop(**{**arguments, "eps": 1e-3, "noise_seed": 1, **changes})


def pda(**changes):
    arguments = dict(learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=0.5, expected_batch_size=8)
    return dp2.PDADPMD(**{**arguments, "alpha": 0.5, "noise_seed": 1, **changes})


each = pytest.mark.parametrize("make", [adadps, pda])


# The arguments of compile.


@pytest.mark.parametrize(
    "optimizer, arguments, message",
    [
        (adadps, {}, r"AdaDPSRMSprop needs public data: .*public_data=\(x, y\).* Received: public_data=None"),
        (pda, {"public_batch_size": 2}, "PDADPMD needs public data"),
        (pda, {"public_data": PUBLIC[0]}, r"`public_data` must be \(x, y\) .* Received: ndarray"),
        (pda, {"public_data": [tf.data.Dataset.range(3)]}, "`public_data` must be"),
        (pda, {"public_data": (PUBLIC[0], PUBLIC[1][:3])}, "one row per example"),
        (pda, {"public_data": PUBLIC, "public_batch_size": 7},
         "`public_batch_size` must be at most the 6 rows .* Received: public_batch_size=7"),
        (pda, {"public_data": PUBLIC, "public_batch_size": 0}, "Received: public_batch_size=0"),
        (pda, {"public_data": (PUBLIC[0][:0], PUBLIC[1][:0])}, "public_batch_size=0"),
        (lambda: dp2.DPSGD(0.1, 1.0, 1.0), {"public_data": PUBLIC}, "must be left out with this DPSGD"),
        (lambda: dp2.DPSGD(0.1, 1.0, 1.0), {"public_batch_size": 3}, "must be left out with this DPSGD"),
        (lambda: adadps(public_second_moments=[np.ones((FEATURES, 1)), [1.0]]), {"public_data": PUBLIC},
         "must be left out with this AdaDPSRMSprop"),
    ],
)  # fmt: skip
def test_compile_refuses_what_does_not_fit(optimizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        logistic_model(FEATURES, optimizer(), **arguments)


def test_labels_out_of_range_are_found_in_public_data_too():
    model = dp2.DP2Sequential([keras.Input((FEATURES,)), keras.layers.Dense(2, "softmax")])
    with pytest.raises(ValueError, match="The labels must be at least 0 and below 2"):
        model.compile(pda(), "sparse_categorical_crossentropy", public_data=(X, np.full(8, 2)))


def test_an_optimizer_takes_public_gradients_if_and_only_if_it_needs_them():
    model = logistic_model(FEATURES, dp2.DPSGD(0.1, 1.0, 1.0, expected_batch_size=8))
    with pytest.raises(ValueError, match="DPSGD takes no public gradients"):
        model.optimizer.begin_step(model.trainable_variables, PublicGradients([]))
    model = logistic_model(FEATURES, pda(), public_data=PUBLIC)
    for wrong in (None, [tf.zeros([FEATURES, 1]), tf.zeros([1])]):
        with pytest.raises(ValueError, match="PDADPMD needs public data"):
            model.optimizer.begin_step(model.trainable_variables, wrong)


# The draw.


def drawn(batch_size, step=0, seed=1):
    source = NoiseSource(seed)
    bits = lambda shape: source.bits(shape, tf.constant(step, tf.int64), stream=3)  # noqa: E731
    (rows,) = PublicData((np.arange(10),), batch_size).batch(bits)
    return rows.numpy()


def test_rows_are_drawn_uniformly_anew_in_each_step_and_again_with_the_seed():
    rows = np.concatenate([drawn(5, step) for step in range(400)])
    counts = np.bincount(rows, minlength=10)
    assert len(rows) == 2000 and np.all(np.abs(counts - 200) < 5 * np.sqrt(180))
    np.testing.assert_array_equal(drawn(5, 7), drawn(5, 7))
    assert not np.array_equal(drawn(5, 7), drawn(5, 8))


def test_all_rows_are_used_where_as_many_are_asked_for():
    np.testing.assert_array_equal(drawn(10), np.arange(10))
    assert PublicData((np.arange(100),)).batch_size == 64
    assert PublicData((np.arange(10),)).batch_size == 10


@each
def test_a_run_with_a_seed_repeats_and_one_without_draws_other_rows(make):
    def run(**changes):
        model = logistic_model(FEATURES, make(noise_multiplier=0.0, **changes), public_data=PUBLIC,
                               public_batch_size=2)  # fmt: skip
        for _ in range(3):
            model.train_on_batch(X, Y)
        return flat_weights(model)

    np.testing.assert_array_equal(run(), run())
    assert np.any(run(noise_seed=None) != run(noise_seed=None))


# The gradient.


def public_gradient(model, x, y):
    """What the optimizer would get, if this were the private batch."""

    @tf.function(autograph=False)
    def gradients():
        data = tf.nest.map_structure(tf.constant, (x, y))
        return model._public_gradients(model.trainable_variables, (*data, None)).values

    return zoo.flat(gradients())


def private_model(kind, optimizer=None, **arguments):
    model = zoo.filled(dp2.make_private(kind.build()), kind.x)
    model.compile(optimizer or pda(), kind.loss, **arguments)
    return model


@pytest.mark.parametrize(
    "name, method",
    [
        *itertools.product(["dense", "embedding", "lstm", "two_outputs"], ["ghost", "vectorized", "loop"]),
        *itertools.product(["subclassed"], ["vectorized", "loop"]),  # Ghost refuses what it cannot see into.
    ],
)
def test_it_is_the_mean_gradient_of_the_compiled_loss(name, method):
    kind = zoo.KINDS[name]
    model = private_model(kind, public_data=(kind.x, kind.y), method=method)
    plain = zoo.filled(kind.build(), kind.x)
    slow = zoo.slow_gradients(plain, kind.x, kind.y, zoo.sum_of_losses(kind.loss))
    expected = np.mean(list(slow(zoo.flat(plain.trainable_variables), range(zoo.ROWS))), axis=0)
    few = slice(0, 4)
    ours = public_gradient(model, zoo.take(kind.x, few), zoo.take(kind.y, few))
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "none"])
def test_it_is_a_mean_whatever_the_reduction_of_the_loss(reduction):
    model = dp2.DP2Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(pda(), keras.losses.MeanSquaredError(reduction=reduction), public_data=PUBLIC)
    residual = -2 * PUBLIC[1]
    expected = np.concatenate([np.mean(residual * PUBLIC[0], axis=0), np.mean(residual, axis=0)])
    np.testing.assert_allclose(public_gradient(model, X, Y), expected, rtol=1e-5, atol=1e-6)


@each
def test_the_private_batch_does_not_touch_it(make):
    model = logistic_model(FEATURES, make(), public_data=PUBLIC, public_batch_size=4)
    model.set_weights([np.ones((FEATURES, 1)), np.ones(1)])
    expected = public_gradient(model, X, Y)
    for x, y in ((X[::-1], Y), (1e6 * X, 1 - Y), (X[:1], Y[:1]), (X * np.nan, Y), (X[:0], Y[:0])):
        np.testing.assert_array_equal(public_gradient(model, x, y), expected)


def test_public_rows_are_not_in_the_clipped_sum():
    def private_sum(public):
        model = logistic_model(FEATURES, pda(), public_data=public)
        gradients = PublicGradients([tf.zeros([FEATURES, 1]), tf.zeros([1])])
        query = model.optimizer.begin_step(model.trainable_variables, gradients)
        return zoo.flat(model._answer(query, (X, Y, None))[0].clipped_sum.values)

    np.testing.assert_array_equal(private_sum(PUBLIC), private_sum((1e6 * PUBLIC[0], PUBLIC[1])))


def test_dropout_is_new_in_each_step_and_public_rows_are_in_no_metric():
    layers = [keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    logs = []
    for public in (PUBLIC, (1e3 * PUBLIC[0], PUBLIC[1])):
        model = dp2.DP2Sequential([keras.Input((FEATURES,)), *layers])
        model.compile(pda(alpha=0.0, learning_rate=0.0), "mse", metrics=["mae"], public_data=public)
        logs.append(model.train_on_batch(X, Y, return_dict=True))
        model.optimizer.iterations.assign(0)
    assert logs[0] == logs[1]
    first, again = (public_gradient(model, X, Y) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    model.optimizer.iterations.assign(7)
    assert np.any(public_gradient(model, X, Y) != first)


def test_regularisers_are_added_once():
    def trained(alpha):
        layer = keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer="l2")
        model = dp2.DP2Sequential([keras.Input((FEATURES,)), layer])
        model.compile(pda(alpha=alpha, learning_rate=1.0, noise_multiplier=0.0, l2_norm_clip=np.inf), "mse",
                      public_data=(0 * PUBLIC[0], 0 * PUBLIC[1]))  # fmt: skip
        model.train_on_batch(0 * X, 0 * Y)
        return flat_weights(model)

    for alpha in (0.0, 0.5, 1.0):
        np.testing.assert_allclose(trained(alpha), [0.98] * FEATURES + [0.0], rtol=1e-6)


@pytest.mark.parametrize("make, method, bad", [
    (adadps, "ghost", np.nan), (adadps, "vectorized", 1e30), (pda, "loop", np.inf), (pda, "ghost", 1e30),
])  # fmt: skip
def test_public_rows_that_are_not_finite_do_not_poison_anything(make, method, bad):
    public, rest = (PUBLIC[0].copy(), PUBLIC[1]), tuple(np.delete(part, 2, axis=0) for part in PUBLIC)
    public[0][2] = bad
    models = [logistic_model(FEATURES, make(), public_data=rows, method=method) for rows in (public, rest)]
    for model in models:
        model.set_weights([-np.ones((FEATURES, 1)), np.ones(1)])
    with_bad, without = (public_gradient(model, X, Y) for model in models)
    if not np.isfinite(bad):  # The gradient of a huge row may be finite.
        np.testing.assert_allclose(6 * with_bad, 5 * without, rtol=1e-4, atol=1e-6)
    for _ in range(3):
        models[0].train_on_batch(X, Y)
    assert np.all(np.isfinite(flat_weights(models[0])))
    assert all(np.all(np.isfinite(v.numpy())) for v in models[0].optimizer.variables)


def test_a_mean_whose_square_overflows_counts_as_zero():
    (value,) = PublicGradients.mean_of([tf.constant([1e25, 1.0])], 2).values
    np.testing.assert_array_equal(value, [0.0, 0.0])
    (rows,) = PublicGradients.of_each([tf.constant([[np.nan, 1.0], [1.0, 2.0], [1e25, 0.0]])]).values
    np.testing.assert_array_equal(rows, [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])


# Everything that a model can be.


@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {}, {"jit_compile": True}])
@each
def test_eagerly_in_a_graph_and_by_xla(make, mode):
    model = logistic_model(FEATURES, make(), public_data=PUBLIC, public_batch_size=3, **mode)
    expected = logistic_model(FEATURES, make(), public_data=PUBLIC, public_batch_size=3)
    for one in (model, expected):
        for _ in range(3):
            one.train_on_batch(X, Y)
    np.testing.assert_allclose(flat_weights(model), flat_weights(expected), rtol=1e-5, atol=1e-6)


@each
def test_physical_batches_change_nothing(make):
    weights = []
    for size in (None, 3):
        model = logistic_model(FEATURES, make(), public_data=PUBLIC, physical_batch_size=size)
        for _ in range(3):
            model.train_on_batch(X, Y)
        weights.append(flat_weights(model))
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)


def test_sparse_public_rows_of_a_sparse_model():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    weights = []
    for sparse in (True, False):
        model = dp2.DP2Sequential(
            [keras.Input((FEATURES,), sparse=sparse), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        make = scipy_sparse.csr_matrix if sparse else np.asarray
        model.compile(adadps(), "mse", public_data=(make(PUBLIC[0]), PUBLIC[1]), public_batch_size=3)
        model.fit(make(X), Y, batch_size=8, epochs=3, verbose=0)
        weights.append(flat_weights(model))
    np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-6)


@each
def test_a_wrapped_model_and_dict_inputs(make):
    for name in ("subclassed", "dict_inputs"):
        kind = zoo.KINDS[name]
        model = private_model(kind, make(), public_data=(kind.x, kind.y), public_batch_size=4)
        model.fit(kind.x, kind.y, batch_size=4, verbose=0)
        assert np.all(np.isfinite(flat_weights(model)))


def test_a_plain_model_is_told_what_to_do():
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(pda(), keras.losses.MeanSquaredError(reduction="none"), jit_compile=False)
    with pytest.raises(ValueError, match="on a private model"):
        model.train_on_batch(X, Y)


# It is kept nowhere, and named where it counts.


def test_no_file_has_it_and_a_loaded_model_asks_for_it(tmp_path):
    secret = np.full((6, FEATURES), 1234.5678, np.float32)
    model = logistic_model(FEATURES, adadps(), public_data=(secret, PUBLIC[1]))
    model.train_on_batch(X, Y)
    path = tmp_path / "model.keras"
    model.save(path)
    with zipfile.ZipFile(path) as file:
        content = b"".join(file.read(name) for name in file.namelist())
    assert b"1234.56" not in content and secret[0, :1].tobytes() not in content
    assert b"public_data" not in json.dumps(model.get_compile_config(), default=str).encode()
    loaded = keras.models.load_model(path)
    with pytest.raises(ValueError, match="AdaDPSRMSprop needs public data: .* compile a loaded model again"):
        loaded.train_on_batch(X, Y)
    assert int(loaded.optimizer.iterations) == 1
    loaded.compile(loaded.optimizer, loaded.loss, public_data=(secret, PUBLIC[1]))
    for one in (model, loaded):
        one.train_on_batch(X, Y)
    np.testing.assert_array_equal(flat_weights(loaded), flat_weights(model))


@pytest.mark.parametrize(
    "optimizer", [adadps, pda, lambda: adadps(public_second_moments=[np.ones((FEATURES, 1)), [1.0]])]
)
def test_the_statement_names_it_and_a_file_keeps_it(optimizer, tmp_path):
    optimizer = optimizer()
    public = {} if optimizer.public_gradients is None else {"public_data": PUBLIC}
    model = logistic_model(FEATURES, optimizer, **public)
    model.train_on_batch(X, Y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        (entry,) = one.ledger.entries
        assert entry.mechanism.public_data
        stated = one.privacy_statement(1e-5)
        assert stated.to_dict()["assumptions"] == ["public_data"]
        words = " ".join(str(stated).split())
        assert "The steps also used public data." in words
        assert "it holds nothing of the protected examples" in words


def test_other_optimizers_say_nothing_of_it():
    assert not dp2.DPSGD(0.1, 1.0, 1.0).mechanism().public_data


def test_ledgers_from_before_can_be_read():
    ledger = Ledger()
    ledger.begin(Mechanism("DPSGD", (1.0,), (1.0,)), UnknownSampling())
    ledger.advance(3)
    document = json.loads(ledger.to_json())
    del document["entries"][0]["mechanism"]["public_data"]
    assert Ledger.from_json(json.dumps(document)) == ledger
    document["entries"][0]["mechanism"]["public_data"] = "no"
    with pytest.raises(ValueError, match="`public_data` must be True or False"):
        Ledger.from_json(json.dumps(document))
