"""A budget stops before the step that would overspend: in the graph, in the midst of an epoch, over fits."""

import keras
import numpy as np
import pytest

import dp2_keras as dp2
from dp2_keras import accounting
from dp2_keras.entries import Entry, PoissonSampling
from dp2_keras.ledger import Ledger

N, B, DELTA = 100, 10, 1e-2
X = np.linspace(-1, 1, N).astype(np.float32)[:, None]
IMDB = dict(dataset_size=25_000, batch_size=64)


def model_of(optimizer=None, **arguments):
    model = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer or dp2.DPSGD(0.1, 1.0, 1.0), loss="mse", **arguments)
    return model


def cost(steps, noise_multiplier=1.0, rate=B / N, delta=DELTA, **terms):
    """The oracle: dp_accounting's price of so many steps."""
    return (
        accounting.epsilon(accounting.dp_event(noise_multiplier, rate, steps), delta, **terms) if steps else 0
    )


def fit(model, budget=None, epochs=2, **arguments):
    callbacks = [] if budget is None else [budget]
    callbacks += arguments.pop("callbacks", [])
    return model.fit(
        X, X, **{"batch_size": B, "epochs": epochs, "verbose": 0, **arguments}, callbacks=callbacks
    )


def budget_for(steps, **arguments):
    """A budget that pays for so many steps and not for one more."""
    return dp2.PrivacyBudget((cost(steps) + cost(steps + 1)) / 2, DELTA, **arguments)


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 19])
@pytest.mark.parametrize(
    "execution", [{}, {"steps_per_execution": 4}, {"run_eagerly": True}, {"jit_compile": True}]
)
def test_it_stops_before_the_step_that_would_overspend(steps, execution):
    model = model_of(**execution)
    history = fit(model, budget_for(steps), epochs=5).history
    assert int(model.optimizer.iterations) == model.ledger.steps == steps
    assert len(history["epsilon"]) == -(-steps // (N // B))
    assert history["epsilon"][-1] == pytest.approx(cost(steps), rel=1e-12)
    assert model.privacy_spent(DELTA) <= budget_for(steps).epsilon < cost(steps + 1)


def test_a_budget_that_lasts_changes_nothing():
    models = [model_of(dp2.DPSGD(0.1, 1.0, 1.0, noise_seed=1)) for _ in range(2)]
    models[1].set_weights(models[0].get_weights())
    fit(models[0])
    fit(models[1], dp2.PrivacyBudget(1000.0))
    np.testing.assert_array_equal(models[0].get_weights()[0], models[1].get_weights()[0])


def test_it_counts_over_fits_and_then_refuses():
    model, budget = model_of(), budget_for(25)
    fit(model, budget, epochs=2)
    assert model.ledger.steps == 20
    fit(model, budget, epochs=2)
    assert model.ledger.steps == 25
    weights = model.get_weights()
    with pytest.raises(
        dp2.BudgetExhaustedError, match="is spent after 25 steps, and one more would exceed it"
    ):
        fit(model, budget)
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])
    assert model.ledger.steps == 25 == int(model.optimizer.iterations)


def test_a_step_that_is_not_paid_changes_nothing_at_all():
    model = model_of(dp2.DP2RMSprop(0.1, 1.0, 1.0, delay=2), steps_per_execution=10, metrics=["mae"])
    draws = lambda: int(model.optimizer._noise_source._draws)  # noqa: E731
    fit(model, budget_for(3))
    assert int(model.optimizer.iterations) == 3
    assert draws() == 2 * 3  # For the noise and for random layers.


def test_budget_exhausted_at_the_end_of_an_epoch_starts_no_other():
    model = model_of()
    assert len(fit(model, budget_for(10), epochs=3).history["loss"]) == 1


def test_a_new_fit_of_other_terms_is_priced_with_the_old_one():
    model = model_of()
    fit(model, epochs=1)  # 10 steps at 1 / 10.
    fit(model, dp2.PrivacyBudget(cost(10) * 1.2, DELTA), batch_size=20, epochs=9)
    entries = model.ledger.entries
    assert [e.sampling.batch_size for e in entries] == [10, 20]
    assert model.privacy_spent(DELTA) <= cost(10) * 1.2
    more = Ledger([entries[0], Entry(entries[1].mechanism, entries[1].sampling, entries[1].steps + 1)])
    assert more.epsilon(DELTA) > cost(10) * 1.2


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_accountant_of_the_budget_is_the_one_that_counts(accountant):
    model = model_of()
    history = fit(model, dp2.PrivacyBudget(2.5, DELTA, accountant=accountant), epochs=20).history
    steps = model.ledger.steps
    assert cost(steps, accountant=accountant) <= 2.5 < cost(steps + 1, accountant=accountant)
    assert history["epsilon"][-1] == pytest.approx(cost(steps, accountant=accountant), rel=1e-6)


def test_shuffled_batches_spend_the_proved_figure():
    model = model_of(dp2.DPSGD(0.1, 1.0, 4.0))
    passes = lambda k: accounting.epsilon(accounting.dp_event(4.0, 1.0, k), DELTA)  # noqa: E731
    budget = dp2.PrivacyBudget((passes(2) + passes(3)) / 2, DELTA)
    history = fit(model, budget, epochs=6, sampling="shuffle").history
    assert model.ledger.steps == 20 and len(history["loss"]) == 2  # Two passes are paid, a third is not.
    assert history["epsilon"] == pytest.approx([passes(1), passes(2)], rel=1e-9)


def test_imdb_stops_after_step_38285():
    """The whole history is in the ledger: its last steps run here."""
    model = model_of()
    mechanism = model.optimizer.mechanism()
    x = np.zeros((IMDB["dataset_size"], 1), np.float32)
    model.account().take_over(Ledger([Entry(mechanism, PoissonSampling(**IMDB), 38_000)]))
    model.compile(model.optimizer, loss="mse", steps_per_execution=7)
    budget = dp2.PrivacyBudget(3.0, 1e-5)
    model.fit(x, x, batch_size=64, epochs=3, verbose=0, callbacks=[budget])
    assert model.ledger.steps == 38_285 and int(model.optimizer.iterations) == 285
    with pytest.raises(dp2.BudgetExhaustedError):
        model.fit(x, x, batch_size=64, verbose=0, callbacks=[budget])


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution, epochs", [(1, [100]), (200, [60, 40])])
def test_imdb_stops_after_step_38285_in_full(steps_per_execution, epochs):
    model = model_of(steps_per_execution=steps_per_execution)
    x = np.zeros((IMDB["dataset_size"], 1), np.float32)
    budget = dp2.PrivacyBudget(3.0, 1e-5)
    for count in epochs:
        model.fit(x, x, batch_size=64, epochs=count, verbose=0, callbacks=[budget])
    assert model.ledger.steps == 38_285 == int(model.optimizer.iterations)
    with pytest.raises(dp2.BudgetExhaustedError):
        model.fit(x, x, batch_size=64, verbose=0, callbacks=[budget])


# Calibration.


@pytest.mark.parametrize("name, more", [("DPSGD", {}), ("DP2RMSprop", {"delay": 3})])
def test_auto_noise_spends_the_budget_over_the_whole_fit(name, more):
    optimizer = getattr(dp2, name)(0.1, l2_norm_clip=1.0, noise_multiplier="auto", **more)
    model = model_of(optimizer)
    history = fit(model, dp2.PrivacyBudget(2.0, DELTA), epochs=4).history
    assert model.ledger.steps == 40
    assert 0.999 * 2.0 < history["epsilon"][-1] <= 2.0
    expected = dp2.calibrate_noise_multiplier(2.0, DELTA, N, B, 4)
    assert optimizer.sigma == pytest.approx(expected, rel=1e-3)
    with pytest.raises(dp2.BudgetExhaustedError):
        fit(model, dp2.PrivacyBudget(2.0, DELTA))


def test_auto_noise_takes_what_is_left():
    model = model_of()
    fit(model, epochs=1)
    model.compile(dp2.DPSGD(0.1, 1.0, "auto"), loss="mse")
    fit(model, dp2.PrivacyBudget(3.0, DELTA), epochs=2)
    assert model.ledger.steps == 30
    assert 0.999 * 3.0 < model.privacy_spent(DELTA) <= 3.0
    model.compile(dp2.DPSGD(0.1, 1.0, "auto"), loss="mse")
    with pytest.raises(dp2.BudgetExhaustedError, match="is spent after 30 steps"):
        fit(model, dp2.PrivacyBudget(1.0, DELTA))


def test_auto_noise_is_really_added():
    model = model_of(dp2.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier="auto"))
    model.layers[0].trainable = True
    fit(model, dp2.PrivacyBudget(0.05, DELTA), epochs=1)
    # sigma is large, and the weight walks with deviation sigma C / B in each of 10 steps.
    walk = model.optimizer.sigma / B * np.sqrt(10)
    assert walk > 1 and abs(model.get_weights()[0][0, 0]) < 6 * walk
    assert abs(model.get_weights()[0][0, 0]) > 1e-4 * walk


def test_auto_noise_needs_a_budget_and_is_settled_once():
    model = model_of(dp2.DPSGD(0.1, 1.0, "auto"))
    with pytest.raises(ValueError, match='must have a PrivacyBudget for `noise_multiplier="auto"`'):
        fit(model)
    with pytest.raises(ValueError, match='`noise_multiplier="auto"` is settled by `fit`'):
        model.train_on_batch(X, X)
    with pytest.raises(ValueError, match="is settled by `fit`"):
        model.optimizer.dp_event()
    fit(model, dp2.PrivacyBudget(2.0))
    with pytest.raises(AttributeError, match="`noise_multiplier` is settled"):
        model.optimizer.calibrate(2.0)
    assert model.optimizer.get_config()["noise_multiplier"] == "auto"


# The event of a step.


def test_the_optimizer_states_its_event():
    event = dp2.DP2RMSprop(0.1, 1.0, noise_multiplier=2, delay=3).dp_event()
    assert event.noise_multiplier == 2.0 and isinstance(event.noise_multiplier, float)


# Arguments and places.


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(epsilon=0.0), "`epsilon` must be .* Received: epsilon=0.0"),
        (dict(epsilon=1.0, delta=1.0), "`delta` must be .* Received: delta=1.0"),
        (dict(epsilon=1.0, accountant="moments"), "`accountant` must be one of 'rdp', 'pld'"),
        (dict(epsilon=1.0, neighbors="friends"), "`neighbors` must be one of"),
    ],
)
def test_impossible_budgets_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        dp2.PrivacyBudget(**arguments)


def test_the_default_delta_is_that_of_the_data():
    assert dp2.PrivacyBudget(1.0).terms(25_000).delta == 1e-5


def test_one_budget_at_a_time():
    with pytest.raises(ValueError, match="one PrivacyBudget at most"):
        fit(model_of(), dp2.PrivacyBudget(1.0), callbacks=[dp2.PrivacyBudget(2.0)])


def test_a_plain_model_is_refused():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="PrivacyBudget needs a model that keeps a ledger"):
        model.fit(X, X, verbose=0, callbacks=[dp2.PrivacyBudget(1.0)])


def test_a_callback_list_is_kept_as_it_was():
    model = model_of()
    callbacks = keras.callbacks.CallbackList(
        [budget_for(3)], add_history=True, add_progbar=False, model=model, epochs=2, steps=10, verbose=0
    )
    before = list(callbacks.callbacks)
    model.fit(X, X, batch_size=B, epochs=2, verbose=0, callbacks=callbacks)
    assert model.ledger.steps == 3 and callbacks.callbacks == before
    assert len(model.history.history["epsilon"]) == 1


# In the log.


def test_epsilon_is_in_the_history_the_progress_bar_and_other_callbacks(capsys):
    seen = []
    other = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["epsilon"]))
    history = fit(model_of(), epochs=3, verbose=2, callbacks=[other]).history
    assert history["epsilon"] == pytest.approx([cost(10), cost(20), cost(30)], rel=1e-12)
    assert seen == history["epsilon"]
    assert f"epsilon: {cost(30):.4f}" in capsys.readouterr().out


def test_no_noise_costs_infinity():
    assert fit(model_of(dp2.DPSGD(0.1, 1.0, 0.0)), epochs=1).history["epsilon"] == [np.inf]
