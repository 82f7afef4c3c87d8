"""The model's ledger counts the steps that ran, whatever happened, and goes where the weights go."""

import json

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dp2_keras as dp2
from dp2_keras import accounting
from dp2_keras.entries import PoissonSampling, ShuffledSampling, UnknownSampling
from dp2_keras.statement_text import round_up

KERAS_3 = hasattr(keras, "StatelessScope")
N, B, DELTA = 40, 8, 1e-2
NOT_COUNTED = "This step is not one that .* account counts"
X = np.linspace(-1, 1, N).astype(np.float32)[:, None]


def optimizer(**arguments):
    return dp2.DPSGD(**{**dict(learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=1.0), **arguments})


def model_of(optimizer=optimizer, **arguments):
    model = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer(), loss="mse", **arguments)
    return model


def fit(model, **arguments):
    return model.fit(X, X, **{"batch_size": B, "verbose": 0, **arguments})


def saved_weights(model, tmp_path):
    model.save_weights(tmp_path / "model.weights.h5")
    return tmp_path / "model.weights.h5"


class Interrupt(keras.callbacks.Callback):
    """Stops a fit by force after so many steps."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def oracle(steps_by_rate, gaussians=0, sigma=1.0):
    """dp_accounting's price of Poisson steps by rate, and of Gaussians without amplification."""
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    accountant = dp_accounting.rdp.RdpAccountant()
    for rate, steps in steps_by_rate.items():
        if steps:
            accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), steps)
    if gaussians:
        accountant.compose(gaussian, gaussians)
    return accountant.get_epsilon(DELTA) if gaussians or any(steps_by_rate.values()) else 0.0


# Whatever happens.

ACTIONS = st.one_of(
    st.tuples(st.just("fit"), st.sampled_from([4, 8, 10]), st.integers(1, 2)),
    st.tuples(st.just("interrupt"), st.sampled_from([4, 8]), st.integers(1, 6)),
    st.tuples(st.just("train_on_batch"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["save and load", "weights", "checkpoint", "recompile", "evaluate", "unwrap"])),
)


def act(model, action, tmp_path, counts):
    """Does it, and counts what it means."""
    kind, *arguments = action
    if kind == "fit":
        batch_size, epochs = arguments
        fit(model, batch_size=batch_size, epochs=epochs)
        counts[batch_size / N] += epochs * (N // batch_size)
    elif kind == "interrupt":
        batch_size, after = arguments
        if after <= 2 * (N // batch_size):
            with pytest.raises(KeyboardInterrupt):
                fit(model, batch_size=batch_size, epochs=2, callbacks=[Interrupt(after)])
            counts[batch_size / N] += after
    elif kind == "train_on_batch":
        for _ in range(arguments[0]):
            model.train_on_batch(X[:B], X[:B])
        counts[None] += arguments[0]
    elif kind == "save and load":
        model.save(tmp_path / "model.keras")
        model = keras.saving.load_model(tmp_path / "model.keras")
    elif kind == "weights":
        model.save_weights(tmp_path / "model.weights.h5")
        model = model_of(lambda: optimizer(expected_batch_size=B))
        model.load_weights(tmp_path / "model.weights.h5")
    elif kind == "checkpoint":
        path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
        model = model_of(lambda: optimizer(expected_batch_size=B))
        tf.train.Checkpoint(model=model).restore(path)
    elif kind == "recompile":
        model.compile(optimizer(expected_batch_size=B), loss="mse")
    elif kind == "evaluate":
        model.evaluate(X, X, verbose=0)
    elif kind == "unwrap":
        model = dp2.make_private(dp2.unwrap(model))
        model.compile(optimizer(expected_batch_size=B), loss="mse")
    return model


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(ACTIONS, min_size=2, max_size=5))
def test_any_sequence_costs_what_its_steps_cost(tmp_path_factory, actions):
    tmp_path = tmp_path_factory.mktemp("actions")
    model, counts = (
        model_of(lambda: optimizer(expected_batch_size=B)),
        {4 / N: 0, 8 / N: 0, 10 / N: 0, None: 0},
    )
    for action in actions:
        model = act(model, action, tmp_path, counts)
        assert model.ledger.steps == sum(counts.values()), action
    rates = {rate: steps for rate, steps in counts.items() if rate is not None}
    assert model.privacy_spent(DELTA) == pytest.approx(oracle(rates, counts[None]), rel=1e-9)


# What each path is counted as.


@pytest.mark.parametrize("make", [dp2.DP2RMSpropExtraQuery, dp2.DP2AdagradExtraQuery])
def test_a_step_that_asks_its_batch_twice_is_priced_as_two_releases(make):
    model = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(make(0.1, 1.0, noise_multiplier=2.0, delay=2), loss="mse")
    model.fit(X, X, batch_size=B, epochs=3, verbose=0)
    twice = accounting.poisson_sampled(accounting.gaussian(2.0, 2.0), B / N)
    assert model.privacy_spent(DELTA) == pytest.approx(accounting.price([(twice, 3 * N // B)], DELTA))


def test_steps_of_unknown_batches_count_in_full():
    model = model_of(lambda: optimizer(expected_batch_size=B))
    for _ in range(3):
        model.train_on_batch(X[:B], X[:B])
    (entry,) = model.ledger.entries
    assert entry.sampling == UnknownSampling() and entry.steps == 3
    assert model.privacy_spent(DELTA) == pytest.approx(oracle({}, 3), rel=1e-9)


def test_a_loop_of_ones_own_counts_in_full():
    model = model_of(lambda: optimizer(expected_batch_size=B))
    step = tf.function(lambda x: model.train_step((x, x)))
    for _ in range(4):
        step(tf.constant(X[:B]))
    assert model.ledger.entries[0].sampling == UnknownSampling() and model.ledger.steps == 4


def test_shuffled_batches_count_a_pass_for_each_epoch_that_started():
    model = model_of()
    fit(model, sampling="shuffle", epochs=2)
    with pytest.raises(KeyboardInterrupt):
        fit(model, sampling="shuffle", epochs=2, callbacks=[Interrupt(6)])  # A whole epoch, and a step.
    (entry,) = model.ledger.entries
    assert isinstance(entry.sampling, ShuffledSampling) and (entry.steps, entry.passes) == (16, 4)
    assert model.privacy_spent(DELTA) == pytest.approx(oracle({}, 4), rel=1e-9)
    assert model.ledger.epsilon(DELTA, assumed=True) == pytest.approx(oracle({B / N: 16}), rel=1e-9)


def test_an_explicit_assumption_is_priced_and_repeated():
    model = model_of()
    log = fit(model, sampling="shuffle", assume_poisson=True).history
    assert log["epsilon"][-1] == pytest.approx(oracle({B / N: 5}), rel=1e-9)
    assert "assum" in str(model.privacy_statement(DELTA)).lower()


def test_batches_of_ones_own_are_shuffled_by_assumption():
    model = model_of(lambda: optimizer(expected_batch_size=B))
    batches = tf.data.Dataset.from_tensor_slices((X, X)).shuffle(N).batch(B)
    model.fit(batches, dataset_size=N, epochs=3, verbose=0)
    model.fit(batches.repeat(), steps_per_epoch=12, dataset_size=N, verbose=0)  # Twice and a part.
    anew, stream = model.ledger.entries
    assert anew.sampling.own_data and (anew.steps, anew.passes) == (15, 3)
    assert stream.sampling.streamed and (stream.steps, stream.passes) == (12, 3)


def test_a_generator_is_a_source_of_ones_own():
    model = model_of(lambda: optimizer(expected_batch_size=B))
    generator = ((X[:B], X[:B]) for _ in range(100))
    model.fit(generator, steps_per_epoch=5, dataset_size=N, verbose=0)
    assert model.ledger.entries[0].passes == 1 and model.ledger.steps == 5


@pytest.mark.parametrize("change", [dict(noise_multiplier=2.0), dict(l2_norm_clip=2.0)])
def test_another_mechanism_is_another_entry(change):
    model = model_of()
    fit(model)
    model.compile(optimizer(**change), loss="mse")
    fit(model)
    assert [entry.steps for entry in model.ledger.entries] == [5, 5]


def test_truncation_is_in_the_entry_and_in_the_price():
    model = model_of()
    fit(model, max_batch_size=12)
    (entry,) = model.ledger.entries
    assert entry.sampling == PoissonSampling(N, B, max_batch_size=12)
    assert model.privacy_spent(DELTA) > oracle({B / N: 5})


def test_a_seed_is_noted():
    model = model_of(lambda: optimizer(noise_seed=1))
    fit(model)
    (entry,) = model.ledger.entries
    assert entry.mechanism.seeded and entry.sampling.seeded
    assert "no guarantee" in str(model.privacy_statement(DELTA)).lower()


def test_delta_defaults_to_the_rule_and_must_be_known():
    model = model_of(lambda: optimizer(expected_batch_size=B))
    assert model.privacy_spent() == 0.0
    model.train_on_batch(X[:B], X[:B])
    with pytest.raises(ValueError, match="`delta` must be given"):
        model.privacy_spent()
    fit(model)
    assert model.privacy_spent() == model.privacy_spent(1e-2)


# Where the weights go.


def test_the_file_holds_the_ledger_and_a_plain_model_still_loads_it(tmp_path):
    model = model_of()
    fit(model)
    model.save_weights(tmp_path / "model.weights.h5")
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    plain.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(plain.get_weights()[0], model.get_weights()[0])


def test_weights_without_a_ledger_leave_the_ledger_alone(tmp_path):
    model = model_of()
    fit(model)
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    plain.fit(X, X, verbose=0)  # Keras 2 wants the state of its metrics too.
    plain.save_weights(tmp_path / "plain.weights.h5")
    model.load_weights(tmp_path / "plain.weights.h5")
    assert model.ledger.steps == 5


def test_a_tampered_ledger_is_refused(tmp_path):
    import h5py

    model = model_of()
    fit(model)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    with h5py.File(path, "a") as file:
        document = json.loads(bytes(file["dp2_keras_ledger"][:]))
        document["entries"][0]["steps"] = -1
        del file["dp2_keras_ledger"]
        file["dp2_keras_ledger"] = np.frombuffer(json.dumps(document).encode(), np.uint8)
    with pytest.raises(ValueError, match="not a ledger that can be trusted"):
        model.load_weights(path)


def test_models_of_shared_weights_share_their_ledger():
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    one, other = dp2.make_private(plain), dp2.make_private(plain)
    for model in (one, other):
        model.compile(optimizer(), loss="mse")
        fit(model)
    assert one.ledger.steps == other.ledger.steps == 10
    assert dp2.make_private(dp2.unwrap(one)).ledger.steps == 10


def test_a_subclassed_model_keeps_a_ledger_too(tmp_path):
    class Network(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    model = dp2.make_private(Network())
    model.compile(optimizer(), loss="mse")
    fit(model)
    model.save_weights(tmp_path / "model.weights.h5")
    again = dp2.make_private(Network())
    again.compile(optimizer(), loss="mse")
    again(X)
    again.load_weights(tmp_path / "model.weights.h5")
    assert again.ledger == model.ledger and again.ledger.steps == 5


@pytest.mark.parametrize("save_freq, after", [("epoch", 7), (2, 7), (3, 4), (1, 9)])
def test_backup_and_restore_takes_no_step_twice(tmp_path, save_freq, after):
    make = lambda: model_of(lambda: optimizer(noise_seed=3))  # noqa: E731
    backup = lambda: keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=save_freq)  # noqa: E731
    whole, broken, resumed = make(), make(), make()
    broken.set_weights(whole.get_weights())
    fit(whole, epochs=4)
    with pytest.raises(KeyboardInterrupt):
        fit(broken, epochs=4, callbacks=[backup(), Interrupt(after)])
    fit(resumed, epochs=4, callbacks=[backup()])
    assert int(resumed.optimizer.iterations) == resumed.ledger.steps == 20
    assert resumed.ledger == whole.ledger
    np.testing.assert_array_equal(resumed.get_weights()[0], whole.get_weights()[0])


# Nobody's step is counted as another's.


def test_models_of_shared_weights_count_their_own_noise():
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    loud, quiet = dp2.make_private(plain), dp2.make_private(plain)
    quiet.compile(optimizer(noise_multiplier=0.1, expected_batch_size=B), loss="mse")
    loud.compile(optimizer(noise_multiplier=100.0, expected_batch_size=B), loss="mse")
    quiet.train_on_batch(X[:B], X[:B])
    (entry,) = loud.ledger.entries
    assert entry.mechanism.noise_multipliers == (0.1,)


def test_an_optimizer_that_was_put_in_place_is_counted_as_itself():
    model = model_of(lambda: optimizer(expected_batch_size=B))
    model.train_on_batch(X[:B], X[:B])
    model.optimizer = optimizer(noise_multiplier=0.5, expected_batch_size=B)
    model.train_on_batch(X[:B], X[:B])
    assert [entry.mechanism.noise_multipliers for entry in model.ledger.entries] == [(1.0,), (0.5,)]


def test_a_graph_of_another_optimizer_is_refused():
    model = model_of(lambda: optimizer(noise_multiplier=0.1, expected_batch_size=B))
    step = tf.function(lambda x: model.train_step((x, x)))
    step(tf.constant(X[:B]))
    model.compile(optimizer(noise_multiplier=100.0, expected_batch_size=B), loss="mse")
    before = model.get_weights()[0]
    with pytest.raises(tf.errors.InvalidArgumentError, match=NOT_COUNTED):
        step(tf.constant(X[:B]))
    np.testing.assert_array_equal(model.get_weights()[0], before)
    assert model.ledger.steps == 1


def _own_step(model):
    return lambda: model.train_step((tf.constant(X[:B]), tf.constant(X[:B])))


def _traced_step(model):
    step = tf.function(_own_step(model))
    step()
    return step


@pytest.mark.parametrize("step_of", [_own_step, _traced_step])
def test_while_a_fit_runs_it_alone_takes_steps(step_of):
    model = model_of(lambda: optimizer(expected_batch_size=B))
    step = step_of(model)
    before = model.ledger.steps
    inside = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: step())
    with pytest.raises(tf.errors.InvalidArgumentError, match=NOT_COUNTED):
        fit(model, callbacks=[inside])
    assert model.ledger.steps == before
    fit(model)
    step()
    assert model.ledger.steps == before + 6


@pytest.mark.parametrize("call", [lambda m: m.train_on_batch(X, X), fit], ids=["train_on_batch", "fit"])
def test_a_step_inside_a_fit_is_refused(call):
    model = model_of(lambda: optimizer(expected_batch_size=B))
    inside = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: call(model))
    with pytest.raises(RuntimeError, match="must not be called while `fit` runs"):
        fit(model, callbacks=[inside])
    assert model.ledger.steps == 0
    fit(model)
    assert model.ledger.steps == 5


def test_weights_loaded_inside_a_fit_do_not_open_its_budget(tmp_path):
    model = model_of()
    fit(model, epochs=1)  # So that Keras 2 saves the state of its metrics.
    path = saved_weights(model, tmp_path)
    load = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: model.load_weights(path))
    budget = dp2.PrivacyBudget(oracle({B / N: 12}) + 1e-6, DELTA)
    fit(model, epochs=9, callbacks=[load, budget])
    assert model.ledger.steps == 12


def test_loading_forgets_nothing(tmp_path):
    model = model_of()
    fit(model)
    path = saved_weights(model, tmp_path)
    fit(model)
    model.load_weights(path)
    assert model.ledger.steps == 10  # The optimizer's state may hold what the weights have lost.


def test_models_that_share_layers_share_their_history():
    inputs = keras.Input((1,))
    hidden = keras.layers.Dense(2)(inputs)
    encoder, whole = dp2.DP2Model(inputs, hidden), dp2.DP2Model(inputs, keras.layers.Dense(1)(hidden))
    whole.compile(optimizer(), loss="mse")
    fit(whole)
    assert encoder.ledger.steps == 5


def test_the_plain_model_behind_a_private_one_is_counted_in_full():
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model = dp2.make_private(plain)
    model.compile(optimizer(), loss="mse")
    loss = keras.losses.MeanSquaredError(reduction="none")
    plain.compile(optimizer(expected_batch_size=B), loss=loss, jit_compile=False)
    plain.fit(X, X, batch_size=B, verbose=0)
    (entry,) = model.ledger.entries
    assert entry.sampling == UnknownSampling() and entry.steps == 5


@pytest.mark.parametrize(
    "make, arguments, passes",
    [
        (lambda d: d.shuffle(N).batch(16), dict(epochs=2), 2),
        (lambda d: d.shuffle(N).batch(16).repeat(), dict(steps_per_epoch=2), 1),
        (lambda d: d.shuffle(N).repeat().batch(16), dict(steps_per_epoch=3, epochs=2), 4),
        (lambda d: d.shuffle(N).batch(16, drop_remainder=True).repeat(), dict(steps_per_epoch=8), 4),
        (lambda d: d.shuffle(N).repeat(5).batch(16), dict(), 7),
    ],
)
def test_streams_are_counted_by_whole_batches(make, arguments, passes):
    model = model_of(lambda: optimizer(expected_batch_size=16))
    model.fit(make(tf.data.Dataset.from_tensor_slices((X, X))), dataset_size=N, verbose=0, **arguments)
    assert sum(entry.passes for entry in model.ledger.entries) == passes


def test_batches_of_ones_own_must_not_be_larger_than_stated():
    model = model_of(lambda: optimizer(expected_batch_size=B))
    data = tf.data.Dataset.from_tensor_slices((X, X))
    with pytest.raises(ValueError, match="`expected_batch_size` .* must be at least the size of the batches"):
        model.fit(data.batch(2 * B, drop_remainder=True), dataset_size=N, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most `expected_batch_size` examples"):
        model.fit(data.batch(2 * B), dataset_size=N, verbose=0)
    assert model.ledger.steps == 0


def test_a_private_model_in_another_can_be_saved(tmp_path):
    inner = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Dense(2)])
    model = dp2.DP2Sequential([keras.Input((1,)), inner, keras.layers.Dense(1)])
    model.compile(optimizer(), loss="mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    assert keras.saving.load_model(tmp_path / "model.keras").ledger == model.ledger
    assert inner.ledger.steps == 5


def test_a_restored_fit_whose_budget_is_spent_says_so(tmp_path):
    budget = lambda: dp2.PrivacyBudget(oracle({B / N: 7}) + 1e-6, DELTA)  # noqa: E731
    backup = lambda: keras.callbacks.BackupAndRestore(str(tmp_path / "b"), save_freq=1)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        fit(model_of(), epochs=4, callbacks=[backup(), budget(), Interrupt(7)])
    with pytest.raises(dp2.BudgetExhaustedError):
        fit(model_of(), epochs=4, callbacks=[backup(), budget()])


def test_files_without_a_ledger_say_so(tmp_path):
    model = model_of()
    fit(model)
    with pytest.warns(UserWarning, match="no room for the ledger"):
        model.save(tmp_path / "model.h5")


# In words.


def test_the_statement_is_that_of_the_ledger():
    model = model_of()
    fit(model)
    facts = json.loads(model.privacy_statement(DELTA).to_json())
    assert facts["epsilon"] == model.privacy_spent(DELTA) and facts["steps"] == 5
    assert f"epsilon = {round_up(model.privacy_spent(DELTA))}" in str(model.privacy_statement(DELTA))
