"""`fit` draws Poisson batches of its data, and asks how batches of one's own were drawn."""

import keras
import numpy as np
import pytest
import scipy.sparse
import scipy.stats
import tensorflow as tf
from test_sampling import SPARSE

import dp2_keras as dp2
from dp2_keras.entries import PoissonSampling
from dp2_keras.sampling import poisson_batches


def logged(rows_seen, **compile_arguments):
    """A model whose predictions tell which rows a step saw; the rows are the inputs."""

    class Spy(keras.metrics.Metric):
        def update_state(self, y_true, y_pred, sample_weight=None):
            tf.py_function(lambda y: rows_seen.append(y.numpy().ravel().astype(int)), [y_true], [])

        def result(self):
            return tf.constant(0.0)

    model = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dp2.DPSGD(0.1, 1.0, 1.0), loss="mse", metrics=[Spy(name="spy")], **compile_arguments)
    return model


ROWS = np.arange(90, dtype=np.float32)[:, None]


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_draws_poisson_batches_of_all_of_the_data(jit_compile):
    seen = []
    model = logged(seen, jit_compile=jit_compile)
    model.fit(ROWS, ROWS, batch_size=9, epochs=40, verbose=0)
    assert int(model.optimizer.iterations) == len(seen) == 400
    assert all((np.diff(rows) > 0).all() for rows in seen)
    counts = np.bincount(np.concatenate(seen), minlength=90)
    assert min(scipy.stats.binomtest(int(k), 400, 0.1).pvalue for k in counts) > 1e-6 / 90  # Error rate 1e-6.
    assert len({tuple(rows) for rows in seen}) > 390  # Anew in each epoch.


@pytest.mark.parametrize(
    "n, batch_size, steps", [(90, 9, 10), (91, 9, 10), (98, 9, 10), (99, 9, 11), (8, 9, 1), (90, None, 2)]
)
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_the_number_of_steps_depends_on_n_alone(n, batch_size, steps, steps_per_execution):
    model = logged([], steps_per_execution=steps_per_execution)
    rows = np.zeros((n, 1), np.float32)
    model.fit(rows, rows, batch_size=batch_size, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == model.ledger.steps == 2 * steps
    (entry,) = model.ledger.entries
    assert entry.sampling.dataset_size == n and entry.sampling.batch_size == min(batch_size or 32, n)


def test_validation_is_untouched_by_sampling():
    seen = []
    model = logged(seen)
    log = model.fit(ROWS, ROWS, batch_size=10, epochs=3, validation_split=0.5, verbose=0).history
    assert len(log["val_loss"]) == 3
    training = [rows for rows in seen if not len(rows) or rows[-1] < 45]
    validation = np.concatenate([rows for rows in seen if len(rows) and rows[-1] >= 45])
    assert len(training) == 3 * (45 // 10)
    np.testing.assert_array_equal(validation, np.tile(np.arange(45, 90), 3))
    (entry,) = model.ledger.entries
    assert entry.sampling.dataset_size == 45


def test_sample_and_class_weights_follow_their_rows():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), (np.arange(40) % 2).astype(np.float32)
    weights = np.where(y == 1, 3.0, 0.5).astype(np.float32)
    ends = []
    for arguments in (dict(sample_weight=weights), dict(class_weight={0: 0.5, 1: 3.0}), {}):
        keras.utils.set_random_seed(0)
        model = dp2.DP2Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(dp2.DPSGD(0.1, 10.0, 0.0, noise_seed=1), loss="mse")
        model.fit(x, y, batch_size=8, verbose=0, **arguments)
        ends.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5)
    assert not np.allclose(ends[0], ends[2], rtol=1e-2)


def test_sparse_rows_train_like_dense_ones():
    dense = SPARSE.toarray().astype(np.float32) / 60
    ends = []
    for x in (dense, SPARSE / 60, tf.sparse.from_dense(dense)):
        keras.utils.set_random_seed(0)
        model = dp2.DP2Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(dp2.DPSGD(0.1, 1.0, 1.0, noise_seed=1), loss="mse")
        model.fit(x, np.ones(30), batch_size=5, verbose=0)
        ends.append(model.get_weights()[0])
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-5)
    np.testing.assert_allclose(ends[2], ends[0], rtol=1e-5)


def test_empty_draws_are_steps_of_noise():
    model = logged([])
    rows = np.ones((50, 1), np.float32)
    model.fit(rows, rows, batch_size=1, epochs=2, verbose=0)  # About 37 of 100 are empty.
    assert model.ledger.steps == 100
    assert np.isfinite(model.get_weights()[0]).all()


def test_xla_compiles_for_a_handful_of_sizes():
    sizes = []

    class Traced(dp2.DP2Sequential):
        def _compilation(self):
            given = super()._compilation()
            inner = given["padded_size"]

            def padded(count):
                size = inner(count)
                tf.py_function(lambda s: sizes.append(int(s)), [size], [])
                return size

            return {**given, "padded_size": padded}

    model = Traced([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dp2.DPSGD(0.1, 1.0, 1.0), loss="mse", jit_compile=True)
    x = np.ones((2000, 1), np.float32)
    model.fit(x, x, batch_size=20, epochs=3, verbose=0)
    assert len(sizes) == 300 and len(set(sizes)) <= 5


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(shuffle=False), "`shuffle` must be left out with Poisson sampling.*Received: shuffle=False"),
        (dict(dataset_size=90), "`dataset_size` must be left to the arrays"),
        (
            dict(sampling="bootstrap"),
            "`sampling` must be one of 'poisson', 'shuffle'. Received: sampling='bootstrap'",
        ),
        (dict(sampling="shuffle", max_batch_size=9), "`max_batch_size` must be left out unless"),
        (dict(assume_poisson=True), "`assume_poisson` must be left out where the batches"),
        (dict(max_batch_size=0), "`max_batch_size` must be a positive integer"),
        (dict(validation_split=1.5), "`validation_split` must be at least 0 and below 1"),
        (dict(sampling="shuffle", shuffle=False, assume_poisson=True), "fixed order"),
    ],
)
def test_fits_that_contradict_themselves_are_refused(arguments, message):
    model = logged([])
    with pytest.raises(ValueError, match=message):
        model.fit(ROWS, ROWS, verbose=0, **arguments)
    assert model.ledger.steps == 0


def test_batches_of_the_users_own_need_the_size_of_the_data():
    model = logged([])
    batches = tf.data.Dataset.from_tensor_slices((ROWS, ROWS)).batch(10)
    with pytest.raises(ValueError, match="`dataset_size` must be given where the batches are your own"):
        model.fit(batches, verbose=0)
    with pytest.raises(ValueError, match="`expected_batch_size` must be given"):
        model.fit(batches, dataset_size=90, verbose=0)


@pytest.mark.parametrize("drawn", [{}, {"seed": 0}, {"max_batch_size": 12}], ids=str)
def test_batches_of_poisson_batches_say_how_they_were_drawn(drawn):
    model = logged([])
    model.fit(poisson_batches(ROWS, ROWS, batch_size=9, steps=10, **drawn), verbose=0)
    (entry,) = model.ledger.entries
    assert entry.steps == 10
    assert entry.sampling == PoissonSampling(90, 9, drawn.get("max_batch_size"), seeded="seed" in drawn)


@pytest.mark.parametrize(
    "said",
    [{"sampling": "shuffle"}, {"dataset_size": 91}, {"max_batch_size": 20}, {"assume_poisson": True}],
    ids=str,
)
def test_batches_of_poisson_batches_are_not_called_something_else(said):
    batches = poisson_batches(ROWS, ROWS, batch_size=9, steps=10, max_batch_size=12)
    with pytest.raises(ValueError, match="left out"):
        logged([]).fit(batches, **said, verbose=0)


def test_declared_poisson_batches_are_priced_as_such():
    model = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dp2.DPSGD(0.1, 1.0, 1.0, expected_batch_size=9), loss="mse")
    batches = poisson_batches(ROWS, ROWS, batch_size=9, steps=10).map(lambda x, y: (x, y))
    model.fit(batches, sampling="poisson", dataset_size=90, verbose=0)
    (entry,) = model.ledger.entries
    assert entry.steps == 10 and entry.sampling.sampling_probability == 0.1
    for x, y in batches:
        model.train_on_batch(x, y, sampling="poisson", dataset_size=90)
    (entry,) = model.ledger.entries
    assert entry.steps == 20
