"""Calibration: the least noise, and the most steps, that a budget allows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp2_keras import accounting, calibration


def test_calibration_of_imdb():
    sigma = calibration.calibrate_noise_multiplier(3.0, 1e-5, 25_000, 64, 100)
    np.testing.assert_allclose(sigma, 1.0056, atol=1e-4)


@pytest.mark.parametrize("target", [0.1, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("neighbors", ["add_remove", "replace_one"])
def test_calibration_round_trips(target, neighbors):
    sigma = calibration.calibrate_noise_multiplier(target, 1e-5, 1000, 10, 3, neighbors=neighbors)
    cost = lambda s: accounting.epsilon(accounting.dp_event(s, 0.01, 300), 1e-5, neighbors=neighbors)  # noqa: E731
    assert cost(sigma) <= target < cost(sigma * (1 - 2e-5))


def test_calibration_by_loss_distributions_needs_less_noise():
    setting = dict(target_epsilon=2.0, delta=1e-5, dataset_size=10, batch_size=10, epochs=4)
    sigma = calibration.calibrate_noise_multiplier(**setting, accountant="pld")
    assert sigma < calibration.calibrate_noise_multiplier(**setting)
    assert accounting.epsilon(accounting.dp_event(sigma, 1.0, 4), 1e-5, accountant="pld") <= 2.0


@settings(max_examples=50, deadline=None)
@given(st.floats(2**-9, 2**28))
def test_least_noise_is_the_edge_from_above(edge):
    sigma = calibration.least_noise(lambda s: 1.0 if s >= edge else 2.0, 1.0)
    assert edge <= sigma <= edge * (1 + 2e-5)


def test_least_noise_ends_where_nothing_is_spent_and_where_all_is():
    assert calibration.least_noise(lambda sigma: 0.0, 1.0) == 2**-10
    with pytest.raises(ValueError, match="`target_epsilon` must be within reach"):
        calibration.least_noise(lambda sigma: 2.0, 1.0)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_largest_count_is_the_edge(edge, upper):
    assert calibration.largest_count(lambda count: count, edge, upper) == min(edge, upper)


def test_largest_count_is_zero_if_nothing_is_within_the_limit():
    assert calibration.largest_count(lambda count: 5.0 + count, 3.0, 100) == 0


def test_a_budget_of_three_pays_for_38285_steps_of_imdb():
    step = accounting.poisson_sampled(accounting.gaussian(1.0), 64 / 25_000)
    cost = lambda steps: accounting.price([(step, steps)], 1e-5)  # noqa: E731
    assert calibration.largest_count(cost, 3.0, 39_000) == 38_285


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: calibration.least_noise(float, 0), "`target_epsilon` must be .* Received: target_epsilon=0"),
        (lambda: calibration.largest_count(int, 1.0, -1), "`upper` must be .* Received: upper=-1"),
        (
            lambda: calibration.calibrate_noise_multiplier(1.0, 1e-5, 10, 11, 1),
            "`batch_size` and `dataset_size` must be at most `dataset_size`. Received: batch_size=11",
        ),
    ],
)
def test_rejects_impossible_questions(call, message):
    with pytest.raises(ValueError, match=message):
        call()
