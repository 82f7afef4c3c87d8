"""Weights have one history, whoever trains them: models that share layers, files, copies and sources."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import dp2_keras as dp2
from dp2_keras.cli import read_ledger
from dp2_keras.entries import Entry, Mechanism, PoissonSampling
from dp2_keras.ledger import Ledger

N, B, DELTA = 40, 8, 1e-2
X = np.linspace(-1, 1, N).astype(np.float32)[:, None]


def private(*stack, **arguments):
    model = dp2.DP2Sequential([keras.Input((1,)), *stack])
    model.compile(dp2.DPSGD(0.1, 1.0, 1.0, **arguments), loss="mse")
    return model


def fit(model, epochs=1, **arguments):
    return model.fit(X, X, batch_size=B, epochs=epochs, verbose=0, **arguments)  # Five steps an epoch.


def trained(epochs=1):
    model = private(layers.Dense(1))
    fit(model, epochs)
    return model


def steps_of(*models):
    return [model.ledger.steps for model in models]


# Shared layers.


def test_models_that_share_layers_have_one_ledger_even_if_each_had_its_own_before():
    first, second = layers.Dense(1), layers.Dense(1)
    parts = [private(first), private(second)]
    fit(parts[0])
    whole = private(first, second, layers.Dense(1))
    fit(whole, 2)
    assert steps_of(*parts, whole) == [15, 15, 15]
    fit(parts[1], 3)
    fit(parts[0])
    fit(whole)
    assert steps_of(*parts, whole) == [40, 40, 40]


def test_a_private_model_within_another_shares_its_history():
    inner = [trained(), trained(2)]
    outer = private(*inner)
    fit(outer)
    assert steps_of(*inner, outer) == [20, 20, 20]


def test_a_layer_that_is_added_brings_its_history():
    one, other = private(layers.Dense(1)), trained(2)
    fit(one)
    one.add(other.layers[-1])
    one.compile(dp2.DPSGD(0.1, 1.0, 1.0), loss="mse")
    fit(one)
    assert steps_of(one, other) == [20, 20]


def test_a_budget_is_one_for_all_models_of_a_layer():
    shared = layers.Dense(1)
    part, whole = private(shared), private(shared, layers.Dense(1))
    budget = dp2.PrivacyBudget(5.0, DELTA)
    fit(whole, 1000, callbacks=[budget])
    with pytest.raises(dp2.BudgetExhaustedError):
        fit(part, callbacks=[budget])
    assert part.privacy_spent(DELTA) == whole.privacy_spent(DELTA) <= 5.0


def test_a_model_does_not_train_inside_the_fit_of_one_that_shares_its_layer():
    shared = layers.Dense(1)
    part, whole = private(shared), private(shared, layers.Dense(1))

    class Sneak(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            fit(part)

    with pytest.raises(RuntimeError, match="must not be called while `fit` runs"):
        fit(whole, callbacks=[Sneak()])


def test_a_ledger_file_is_released_before_layers_are_shared(tmp_path):
    one, other = trained(), private(layers.Dense(1))
    fit(other, ledger_file=tmp_path / "ledger.jsonl")
    with pytest.raises(ValueError, match="release_ledger_file"):
        private(one.layers[-1], other.layers[-1])
    other.release_ledger_file()
    assert steps_of(private(one.layers[-1], other.layers[-1])) == [10]


def test_a_checkpoint_of_a_model_that_shares_layers_has_all_of_their_history(tmp_path):
    shared = layers.Dense(1)
    part = private(shared)
    fit(part)
    other = trained(2)
    fit(private(other.layers[-1], shared))  # `other` itself is not asked for its account from here on.
    path = tf.train.Checkpoint(model=other).write(str(tmp_path / "checkpoint"))
    loaded = private(layers.Dense(1))
    tf.train.Checkpoint(model=loaded).read(path).expect_partial()
    assert steps_of(loaded) == [20]


# Files and copies.


@pytest.mark.parametrize("name", ["both.keras", "both.weights.h5"])
def test_a_file_of_two_private_models_counts_both(tmp_path, name):
    models = [trained(), trained(3)]
    both, path = keras.Sequential([keras.Input((1,)), *models]), str(tmp_path / name)
    both.save(path) if name.endswith(".keras") else both.save_weights(path)
    assert read_ledger(path).steps == 20
    if name.endswith(".keras"):
        assert [layer.ledger.steps for layer in keras.models.load_model(path).layers] == [20, 20]


def test_loading_adds_what_others_did_and_nothing_twice(tmp_path):
    path = str(tmp_path / "model.weights.h5")
    one, other = trained(), trained(2)
    one.save_weights(path)
    fit(one)
    one.load_weights(path)
    assert steps_of(one) == [10]  # Five of them lost with the weights, and not forgotten.
    for _ in range(2):
        other.load_weights(path)
    assert steps_of(other) == [15]


def test_copies_that_train_apart_and_meet_again_count_all_their_steps(tmp_path):
    path = str(tmp_path / "model.weights.h5")
    one = trained()
    other = dp2.DP2Sequential([keras.Input((1,)), layers.Dense(1)])
    other.compile(dp2.DPSGD(0.1, 1.0, 1.0), loss="mse")
    one.save_weights(path)
    other.load_weights(path)
    fit(one)
    fit(other)
    one.save_weights(path)
    other.load_weights(path)
    assert steps_of(one, other) == [10, 15]


def test_a_copied_account_takes_steps_of_its_own():
    account = trained().account()
    assert copy.deepcopy(account)._origin != account._origin
    assert copy.deepcopy(account).ledger == account.ledger


def test_the_union_of_ledgers_is_the_larger_count_of_each_origin():
    mechanism, sampling = Mechanism("DPSGD", (1.0,), (1.0,)), PoissonSampling(N, B)
    ledger = lambda **steps: Ledger(Entry(mechanism, sampling, n, origin=o) for o, n in steps.items())  # noqa: E731
    joined = ledger(a=3, b=5).joined(ledger(b=2, c=7))
    assert {entry.origin: entry.steps for entry in joined} == {"a": 3, "b": 5, "c": 7}
    assert joined.entries == (Entry(mechanism, sampling, 15),)
    assert joined.joined(joined) == joined and joined.covers(ledger(a=3, c=7))
    again = Ledger.from_json(joined.to_json())
    assert set(again) == set(joined)


# Plain models, which train privately too if their loss is a vector.


def plain(*stack):
    model = keras.Sequential([keras.Input((1,)), *(stack or [layers.Dense(1)])])
    compile_plain(model)
    return model


def compile_plain(model):
    loss = keras.losses.MeanSquaredError(reduction="none")
    model.compile(dp2.DPSGD(0.1, 1.0, 1.0, expected_batch_size=B), loss=loss, jit_compile=False)


def test_the_private_steps_of_a_plain_model_are_counted_when_it_is_wrapped():
    model = plain()
    fit(model, 2)
    for _ in range(2):
        assert steps_of(dp2.make_private(model)) == [10]


def test_a_plain_model_that_is_compiled_again_has_all_its_steps():
    model = plain()
    fit(model, 2)
    compile_plain(model)
    fit(model)
    assert steps_of(dp2.make_private(model)) == [15]


def test_a_plain_model_shares_the_ledger_of_its_layers():
    model = plain()
    wrapped = dp2.make_private(model)
    fit(model)
    assert steps_of(wrapped, private(model.layers[-1])) == [5, 5]
    unwrapped = dp2.unwrap(trained())
    compile_plain(unwrapped)
    fit(unwrapped)
    assert steps_of(dp2.make_private(unwrapped)) == [10]


def test_a_plain_model_from_a_file_has_the_steps_of_its_optimizer(tmp_path):
    model = plain()
    fit(model)
    model.save(tmp_path / "plain.keras")
    again = keras.saving.load_model(tmp_path / "plain.keras")
    fit(again)
    assert steps_of(dp2.make_private(again), dp2.make_private(model)) == [10, 5]


def test_two_plain_models_are_two_histories(tmp_path):
    for _ in range(2):
        model = plain()
        fit(model)
        model = dp2.make_private(model)
        model.compile(dp2.DPSGD(0.1, 1.0, 1.0), loss="mse")
        fit(model, ledger_file=tmp_path / "ledger.jsonl")
        steps = model.ledger.steps
        model.release_ledger_file()
    assert steps == 20


@pytest.mark.parametrize("make", [plain, lambda: private(layers.Dense(1))], ids=["plain", "private"])
def test_no_step_without_the_assertions_that_refuse_one(make):
    tf.config.optimizer.set_experimental_options({"debug_stripper": True})
    try:
        with pytest.raises(ValueError, match="`debug_stripper` must be off"):
            fit(make())
    finally:
        tf.config.optimizer.set_experimental_options({"debug_stripper": False})


def test_a_plain_step_while_a_private_fit_runs_is_refused():
    model = plain()
    wrapped = dp2.make_private(model)
    wrapped.compile(dp2.DPSGD(0.1, 1.0, 1.0), loss="mse")
    inside = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: fit(model))
    with pytest.raises(tf.errors.InvalidArgumentError, match="account counts, so it was not taken"):
        fit(wrapped, callbacks=[inside])
    assert steps_of(wrapped) == [0]


# Batches of one's own.


def own(**arguments):
    return private(layers.Dense(1), **{"expected_batch_size": B, **arguments})


def batches(size, count=N):
    return tf.data.Dataset.from_tensor_slices((X, X)).repeat().take(count).batch(size)


def test_a_batch_has_no_more_examples_than_there_are():
    with pytest.raises(ValueError, match="`batch_size` and `dataset_size` must be at most `dataset_size`"):
        own(expected_batch_size=100).fit(batches(100, 100), dataset_size=N, verbose=0)


def test_what_is_counted_as_one_pass_has_no_more_examples_than_there_are():
    model = own(expected_batch_size=30)
    source = lambda: iter([(X[:30], X[:30])] * 2)  # noqa: E731 (60 examples of 40, in the two steps of a pass)
    spec = (tf.TensorSpec([None, 1]), tf.TensorSpec([None, 1]))
    stream = tf.data.Dataset.from_generator(source, output_signature=spec)
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most `dataset_size` examples"):
        model.fit(stream, dataset_size=N, verbose=0)
    assert steps_of(model) == [1]
    model = own(expected_batch_size=30)
    model.fit(batches(30), dataset_size=N, epochs=2, verbose=0)  # 30 and 10.
    assert model.ledger.entries[0].passes == 2


def test_an_epoch_of_several_passes_is_counted_by_whole_batches():
    model = own(expected_batch_size=30)
    model.fit(batches(30, 3 * N), dataset_size=N, verbose=0)
    assert (model.ledger.steps, model.ledger.entries[0].passes) == (4, 4)


def test_declared_poisson_batches_have_no_fixed_size():
    fixed = tf.data.Dataset.from_tensor_slices((X, X)).batch(B, drop_remainder=True)
    with pytest.raises(ValueError, match="`batch_size` must be left out for Poisson batches"):
        own().fit(fixed, sampling="poisson", dataset_size=N, verbose=0)
