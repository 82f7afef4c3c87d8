"""The event is what ran, and its price is that of the literature."""

import math

import dp_accounting
import numpy as np
import pytest

from dp2_keras import accounting

IMDB = dict(sampling_probability=64 / 25_000, steps=39_000)


def test_event_is_a_self_composition_of_a_sampled_gaussian():
    gaussian = dp_accounting.GaussianDpEvent(1.5)
    sampled = dp_accounting.PoissonSampledDpEvent(0.01, gaussian)
    assert accounting.dp_event(1.5, 0.01, 7) == dp_accounting.SelfComposedDpEvent(sampled, 7)


def test_integer_noise_multiplier_becomes_a_float():
    assert isinstance(accounting.dp_event(1, 0.01, 7).event.event.noise_multiplier, float)


def test_epsilon_of_the_papers_imdb_run():
    event = accounting.dp_event(1.0, **IMDB)
    np.testing.assert_allclose(accounting.epsilon(event, delta=1e-5), 3.0305, atol=1e-4)


def test_epsilon_of_one_unsampled_step_is_near_the_exact_figure():
    # An (epsilon, delta) curve of the Gaussian mechanism, Balle and Wang 2018, Theorem 8.
    epsilon = accounting.epsilon(accounting.dp_event(2.0, 1.0, 1), delta=1e-5)
    phi = lambda t: 0.5 * (1.0 + math.erf(t / math.sqrt(2.0)))  # noqa: E731
    exact = lambda e: phi(0.25 - 2.0 * e) - math.exp(e) * phi(-0.25 - 2.0 * e)  # noqa: E731
    assert exact(epsilon) <= 1e-5 < exact(0.8 * epsilon)


@pytest.mark.parametrize(
    "less, more",
    [
        (dict(noise_multiplier=2.0), dict(noise_multiplier=1.0)),
        (dict(sampling_probability=0.01), dict(sampling_probability=0.02)),
        (dict(steps=100), dict(steps=200)),
    ],
)
def test_epsilon_grows_with_less_noise_and_more_data(less, more):
    base = dict(noise_multiplier=1.0, sampling_probability=0.01, steps=100)
    cost = lambda change: accounting.epsilon(accounting.dp_event(**{**base, **change}), 1e-5)  # noqa: E731
    assert cost(less) < cost(more)


def test_no_noise_costs_infinity():
    event = accounting.dp_event(0, 0.01, 1)
    assert accounting.epsilon(event, delta=1e-5) == math.inf
    private = accounting.dp_event(1.0, 0.01, 1)
    assert accounting.epsilon(dp_accounting.ComposedDpEvent([private, event]), delta=0.5) == math.inf


@pytest.mark.parametrize(
    "size, delta", [(2, 0.1), (10, 0.1), (11, 0.01), (1000, 1e-3), (1001, 1e-4), (25_000, 1e-5)]
)
def test_default_delta_is_the_largest_power_of_ten_not_above_one_over_n(size, delta):
    assert accounting.default_delta(size) == delta
    assert delta <= 1 / size < 10 * delta


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(noise_multiplier=-1.0), "`noise_multiplier` must be .* Received: noise_multiplier=-1.0"),
        (dict(noise_multiplier=math.nan), "`noise_multiplier` must be .* Received: noise_multiplier=nan"),
        (dict(sampling_probability=0), "`sampling_probability` must be .* Received: sampling_probability=0"),
        (dict(sampling_probability=1.1), "greater than 0 and at most 1. Received: sampling_probability=1.1"),
        (dict(steps=0), "`steps` must be a positive integer. Received: steps=0"),
        (dict(steps=1.5), "`steps` must be a positive integer. Received: steps=1.5"),
    ],
)
def test_rejects_impossible_events(change, message):
    with pytest.raises(ValueError, match=message):
        accounting.dp_event(**{**dict(noise_multiplier=1.0, **IMDB), **change})


@pytest.mark.parametrize("delta", [0, 1, -1e-5, math.nan, None, True])
def test_rejects_impossible_deltas(delta):
    with pytest.raises(ValueError, match=f"`delta` must be .* Received: delta={delta}"):
        accounting.epsilon(accounting.dp_event(1.0, 0.01, 1), delta)


@pytest.mark.parametrize("size", [0, 1, -5, 2.5])
def test_rejects_data_sets_without_a_delta(size):
    with pytest.raises(ValueError, match=f"`dataset_size` must be .* Received: dataset_size={size}"):
        accounting.default_delta(size)
