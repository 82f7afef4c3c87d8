"""What a run costs: the optimizer's steps as an event, and the price of an event.

    event = SelfComposed(PoissonSampled(q, Gaussian(sigma)), T)

One step releases one Gaussian sum of a Poisson sample of rate q = B / n, in the SGD and
in the adaptive phase alike, so T steps cost the same whatever the schedule. The relation
is add-or-remove one example, with n public.
"""

from __future__ import annotations

import math

import dp_accounting

from dp2_keras import _checks


def dp_event(noise_multiplier: float, sampling_probability: float, steps: int) -> dp_accounting.DpEvent:
    """Describes a run of any optimizer here that releases one sum per step.

    SelfComposed(PoissonSampled(q, Gaussian(sigma)), T), for an accountant to price.

    Args:
        noise_multiplier: sigma, at least 0.
        sampling_probability: q, the chance of each example to be in a step: the expected
            batch size over the number of examples, above 0 and at most 1.
        steps: T, the number of steps, at least 1.

    Returns:
        The event.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> dp_event(noise_multiplier=1.0, sampling_probability=64 / 25_000, steps=39_000).count
    39000
    """
    _checks.non_negative(noise_multiplier=noise_multiplier)
    _checks.positive_integer(steps=steps)
    if not _checks.is_number(sampling_probability) or not 0 < sampling_probability <= 1:
        _checks.fail("greater than 0 and at most 1", sampling_probability=sampling_probability)
    # Two equal Gaussians of an integer sigma would be priced as one: always a float.
    gaussian = dp_accounting.GaussianDpEvent(float(noise_multiplier))
    sampled = dp_accounting.PoissonSampledDpEvent(float(sampling_probability), gaussian)
    return dp_accounting.SelfComposedDpEvent(sampled, int(steps))


def epsilon(event: dp_accounting.DpEvent, delta: float) -> float:
    """Prices an event: the least epsilon that Renyi accounting proves at `delta`.

    Args:
        event: what ran; see `dp_event`.
        delta: above 0 and below 1; see `default_delta`.

    Returns:
        Epsilon, infinite for an event without noise.

    Raises:
        ValueError: if `delta` is out of range.
        dp_accounting.UnsupportedEventError: for an event the accountant cannot price.

    Guarantees: (epsilon, delta) for neighbours that differ by adding or removing one
        example, the default orders of `dp_accounting.rdp.RdpAccountant`.

    Edge cases: `noise_multiplier=0` costs infinity, for every `delta`.

    Example:
    >>> event = dp_event(noise_multiplier=1.0, sampling_probability=64 / 25_000, steps=39_000)
    >>> f"{epsilon(event, delta=1e-5):.2f}"
    '3.03'

    References:
        Mironov, Talwar and Zhang, Renyi Differential Privacy of the Sampled Gaussian
        Mechanism, https://arxiv.org/abs/1908.10530, 2019.
    """
    if not _checks.is_number(delta) or not 0 < delta < 1:
        _checks.fail("greater than 0 and less than 1", delta=delta)
    if _is_noiseless(event):
        return math.inf
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    return float(accountant.compose(event).get_epsilon(delta))


def default_delta(dataset_size: int) -> float:
    """The usual delta: the largest power of ten that is at most 1 / n.

    Args:
        dataset_size: n, the public number of examples, at least 2.

    Returns:
        10^-k, the least k with 10^k >= n.

    Raises:
        ValueError: if `dataset_size` is not an integer of at least 2.

    Example:
    >>> default_delta(25_000)
    1e-05
    >>> default_delta(1000)
    0.001
    """
    _checks.positive_integer(dataset_size=dataset_size)
    if dataset_size == 1:
        _checks.fail("at least 2, for a delta below 1", dataset_size=dataset_size)
    return float(f"1e-{len(str(dataset_size - 1))}")


def _is_noiseless(event):
    """Whether an event holds a Gaussian without noise, on its own or inside others."""
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return event.noise_multiplier == 0
    inner = getattr(event, "events", None) or [getattr(event, "event", None)]
    return any(_is_noiseless(e) for e in inner if e is not None)
