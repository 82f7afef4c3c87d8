"""What a run costs: the optimizer's steps as events, and the price of events.

    event   = SelfComposed(PoissonSampled(q, Gaussian(sigma)), T)
    epsilon = least value that an accountant proves at delta

One step releases one Gaussian sum of a Poisson sample of rate q = B / n, in the SGD and
in the adaptive phase alike, so T steps cost the same whatever the schedule. Where an
accountant cannot price what ran, a general bound stands in. From (a, d) for adding or removing:

    replacing one example      (2 a, (1 + e^a) d)             as one removed, one added
    truncated Poisson batches  (a, d + (1 + e^a) eta)         eta = P(any batch was truncated)

n is public, so q, T and delta may depend on it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import attr
import dp_accounting
import numpy as np
from scipy import special

from dp2_keras import _checks

try:
    from dp_accounting import TruncatedSubsampledGaussianDpEvent
except ImportError:

    @attr.s(frozen=True, auto_attribs=True)
    class TruncatedSubsampledGaussianDpEvent(dp_accounting.DpEvent):
        """The event of dp-accounting 0.6, for versions that cannot name it; see `poisson_sampled`."""

        dataset_size: int
        sampling_probability: float
        truncated_batch_size: int
        noise_multiplier: float


_ACCOUNTANTS = {"rdp": dp_accounting.rdp.RdpAccountant, "pld": dp_accounting.pld.PLDAccountant}
_RELATIONS = {
    "add_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}
# A loss distribution has a point every 1e-4: beyond this epsilon it would take gigabytes.
_LARGEST_PLD_EPSILON = 100.0
_LARGEST_EXPONENT = 700.0


def gaussian(*noise_multipliers: float) -> dp_accounting.GaussianDpEvent:
    """Describes one or more Gaussian sums released of one batch, as one Gaussian.

    Gaussian((sigma_1^-2 + sigma_2^-2 + ...)^(-1/2)), to be sampled as a whole.

    Args:
        *noise_multipliers: sigma of each release, at least 0.

    Returns:
        The event; without noise if one of the releases is.

    Raises:
        ValueError: for a negative value, or none at all.

    Example:
    >>> f"{gaussian(2.0, 2.0).noise_multiplier:.4f}"
    '1.4142'
    """
    _checks.each(_checks.non_negative, noise_multipliers=noise_multipliers)
    least = float(min(noise_multipliers))
    ratios = [least / sigma if sigma else 1.0 for sigma in noise_multipliers]
    # Always a float: two equal Gaussians of an integer sigma would be priced as one.
    return dp_accounting.GaussianDpEvent(least / math.hypot(*ratios))


def poisson_sampled(
    event: dp_accounting.GaussianDpEvent,
    sampling_probability: float,
    *,
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
) -> dp_accounting.DpEvent:
    """Describes a Gaussian sum of a Poisson sample.

    Args:
        event: the Gaussian; see `gaussian`.
        sampling_probability: q, the chance of each example to be in the sample.
        dataset_size: n, needed with `max_batch_size`.
        max_batch_size: larger samples are cut to a random subset of this size. Defaults to none.

    Returns:
        The event; the truncated one only if a sample can be larger than `max_batch_size`.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> poisson_sampled(gaussian(1.0), 64 / 25_000).sampling_probability
    0.00256
    """
    if not _checks.is_number(sampling_probability) or not 0 < sampling_probability <= 1:
        _checks.fail("greater than 0 and at most 1", sampling_probability=sampling_probability)
    rate = float(sampling_probability)
    if max_batch_size is None:
        return dp_accounting.PoissonSampledDpEvent(rate, event)
    _checks.positive_integer(dataset_size=dataset_size, max_batch_size=max_batch_size)
    if max_batch_size >= dataset_size:
        return dp_accounting.PoissonSampledDpEvent(rate, event)
    return TruncatedSubsampledGaussianDpEvent(dataset_size, rate, max_batch_size, event.noise_multiplier)


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
    step = poisson_sampled(gaussian(noise_multiplier), sampling_probability)
    return dp_accounting.SelfComposedDpEvent(step, int(steps))


def epsilon(
    event: dp_accounting.DpEvent, delta: float, *, accountant: str = "rdp", neighbors: str = "add_remove"
) -> float:
    """Prices an event: `price` of one event that happened once.

    Args:
        event: what ran; see `dp_event`.
        delta: above 0 and below 1; see `default_delta`.
        accountant: "rdp" or "pld".
        neighbors: "add_remove" or "replace_one".

    Returns:
        Epsilon, infinite for an event without noise.

    Raises:
        ValueError: for a value out of range.
        dp_accounting.UnsupportedEventError: for an event the accountant cannot price.

    Example:
    >>> event = dp_event(noise_multiplier=1.0, sampling_probability=64 / 25_000, steps=39_000)
    >>> f"{epsilon(event, delta=1e-5):.2f}"
    '3.03'
    """
    return price([(event, 1)], delta, accountant=accountant, neighbors=neighbors)


def price(
    releases: Iterable[tuple[dp_accounting.DpEvent, int]],
    delta: float,
    *,
    accountant: str = "rdp",
    neighbors: str = "add_remove",
) -> float:
    """Prices events that happened one after the other, each so many times.

    The Renyi divergences of an event are computed once in a process: to ask again, with
    other counts, takes well under a millisecond.

    Args:
        releases: pairs of an event and a count.
        delta: above 0 and below 1; see `default_delta`.
        accountant: "rdp", Renyi divergences at the default orders of `dp_accounting.rdp.RdpAccountant`;
            or "pld", which takes seconds: the lesser of that and the figure of privacy loss
            distributions (both are proofs), which are not asked above an epsilon of 100.
        neighbors: "add_remove" one example, or "replace_one" by another.

    Returns:
        Epsilon; 0 for no events, infinite if one is without noise.

    Raises:
        ValueError: for a value out of range.
        dp_accounting.UnsupportedEventError: for an event the accountant cannot price.

    Guarantees: (epsilon, delta) for data sets that are neighbours. What the accountant cannot
        price itself (truncated batches, Poisson samples with an example replaced) is bounded
        as the head of this file says; then the result may be infinite.

    Example:
    >>> step = poisson_sampled(gaussian(1.0), 64 / 25_000)
    >>> f"{price([(step, 39_000)], delta=1e-5):.2f}"
    '3.03'
    >>> f"{price([(step, 39_000), (gaussian(5.0), 1)], delta=1e-5):.2f}"
    '3.17'

    References:
        Mironov, Talwar and Zhang, Renyi Differential Privacy of the Sampled Gaussian
        Mechanism, https://arxiv.org/abs/1908.10530, 2019.
        Vadhan, The Complexity of Differential Privacy, Lemma 2.2, 2017.
    """
    _checks.open_unit(delta=delta)
    _checks.one_of(_ACCOUNTANTS, accountant=accountant)
    _checks.one_of(_RELATIONS, neighbors=neighbors)
    counts = _counts(releases)
    if not counts or any(map(_is_noiseless, counts)):
        return math.inf if counts else 0.0
    if neighbors == "replace_one" and all(isinstance(e, dp_accounting.GaussianDpEvent) for e in counts):
        # A replaced example moves the sum by 2 C.
        counts, neighbors = {gaussian(e.noise_multiplier / 2): n for e, n in counts.items()}, "add_remove"
    renyi = _bound(counts, delta, "rdp", neighbors)
    if accountant == "rdp" or _renyi_curve(_untruncated(counts))(delta) > _LARGEST_PLD_EPSILON:
        return renyi
    return min(renyi, _bound(counts, delta, "pld", neighbors))


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


def _counts(releases):
    """How often each event happened that is not itself a composition."""
    counts = {}
    for event, count in releases:
        _checks.non_negative_integer(count=count)
        for step, times in _unrolled(event) if count else ():
            counts[step] = counts.get(step, 0) + times * int(count)
    return counts


def _unrolled(event):
    """The parts of an event, with their counts; a sample of several Gaussians is one of one Gaussian."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return [(step, count * event.count) for step, count in _unrolled(event.event)]
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return [pair for part in event.events for pair in _unrolled(part)]
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        parts = _unrolled(event.event)
        if all(isinstance(part, dp_accounting.GaussianDpEvent) for part, _ in parts):
            whole = gaussian(*(part.noise_multiplier / math.sqrt(count) for part, count in parts))
            event = dp_accounting.PoissonSampledDpEvent(event.sampling_probability, whole)
            return [(event if event.sampling_probability < 1 else whole, 1)]
    return [(event, 1)]


def _is_noiseless(event):
    return getattr(getattr(event, "event", event), "noise_multiplier", None) == 0


def _bound(counts, delta, accountant, neighbors):
    """The price, with a bound for each thing that the accountant cannot price itself."""
    group = neighbors == "replace_one" and not (accountant == "pld" and _pld_prices_replacement())
    relation = _RELATIONS["add_remove" if group else neighbors]
    eta = 0.0
    if not all(map(_ACCOUNTANTS[accountant](neighboring_relation=relation).supports, counts)):
        eta, counts = _truncation_probability(counts), _untruncated(counts)
    curve = _renyi_curve(counts) if accountant == "rdp" else _pld_curve(tuple(counts.items()), relation)
    return _least_epsilon(curve, delta, group, eta)


@functools.cache
def _pld_prices_replacement():
    """Whether loss distributions know replaced examples (dp-accounting 0.6)."""
    accountant = dp_accounting.pld.PLDAccountant(neighboring_relation=_RELATIONS["replace_one"])
    return accountant.supports(poisson_sampled(gaussian(1.0), 0.5))


def _untruncated(counts):
    """The counts with truncated samples as plain ones."""
    return _counts((_plain(event), count) for event, count in counts.items())


def _plain(event):
    if not isinstance(event, TruncatedSubsampledGaussianDpEvent):
        return event
    return poisson_sampled(gaussian(event.noise_multiplier), event.sampling_probability)


def _truncation_probability(counts):
    """eta, the chance that any of all samples was too large, by the union bound."""
    truncated = [e for e in counts if isinstance(e, TruncatedSubsampledGaussianDpEvent)]
    tail = lambda e: special.bdtrc(e.truncated_batch_size, e.dataset_size, e.sampling_probability)  # noqa: E731
    return float(sum(counts[event] * tail(event) for event in truncated))


def _least_epsilon(curve, delta, group, eta):
    """The least epsilon = k a with f d + (1 + e^(k a)) eta <= delta, where a = curve(d).

    k = 2 and f = 1 + e^a for a `group` of two, else both are 1. The d that is left decreases in a,
    and the curve in d: so a grows, from what delta alone asks for, to the least solution.
    """
    if not group and not eta:
        return curve(delta)
    k, a = (2 if group else 1), curve(delta)
    for _ in range(1000):
        if k * a > _LARGEST_EXPONENT:
            break
        left = (delta - (1 + math.exp(k * a)) * eta) / (1 + math.exp(a) if group else 1)
        needed = curve(left) if left > 0 else math.inf
        if needed <= a:
            return k * a
        a = needed
    return math.inf


def _renyi_curve(counts):
    """Epsilon as a function of delta, by Renyi divergences that are computed once for each event."""
    total = sum(count * _renyi_divergences(event) for event, count in counts.items())
    orders = _orders()
    return lambda delta: float(dp_accounting.rdp.compute_epsilon(orders, total, delta)[0])


@functools.cache
def _orders():
    return dp_accounting.rdp.RdpAccountant().orders


@functools.lru_cache(maxsize=4096)
def _renyi_divergences(event):
    """One divergence for each order, infinite where the computation failed: below 0, or not a number."""
    divergences = dp_accounting.rdp.RdpAccountant().compose(event).rdp
    return np.where(divergences >= 0, divergences, np.inf)


@functools.lru_cache(maxsize=32)
def _pld_curve(counts, relation):
    """Epsilon as a function of delta, by the composed privacy loss distribution."""
    accountant = dp_accounting.pld.PLDAccountant(neighboring_relation=relation)
    for event, count in counts:
        accountant.compose(event, count)
    return lambda delta: float(accountant.get_epsilon(delta))
