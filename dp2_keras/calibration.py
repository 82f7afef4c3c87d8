"""How much noise, or how many steps, a budget allows.

    sigma = the least with cost(sigma) <= epsilon          by bisection, from above
    count = the largest with cost(count) <= epsilon        by bisection, from below

A cost is any monotone function; that of a run is `accounting.epsilon`. Both answers are within the budget,
however far the bisection went, but for a count of 0, which is the least there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dp2_keras import _checks, accounting


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    dataset_size: int,
    batch_size: int,
    epochs: int,
    *,
    accountant: str = "rdp",
    neighbors: str = "add_remove",
) -> float:
    """Finds the least noise for which a run stays within a budget.

    The run is epochs x (n // B) steps on Poisson samples of rate B / n.

    Args:
        target_epsilon: the most that the run may cost, above 0.
        delta: above 0 and below 1; see `accounting.default_delta`.
        dataset_size: n, the public number of examples.
        batch_size: B, the expected batch size, at most n.
        epochs: how many times n // B steps are made.
        accountant: "rdp" or "pld".
        neighbors: "add_remove" or "replace_one".

    Returns:
        sigma, to a relative 1e-5; the run costs at most `target_epsilon`.

    Raises:
        ValueError: for a value out of range, or a target that no noise reaches.

    Example:
    >>> f"{calibrate_noise_multiplier(3.0, 1e-5, dataset_size=25_000, batch_size=64, epochs=100):.3f}"
    '1.006'
    """
    _checks.positive_integer(dataset_size=dataset_size, batch_size=batch_size, epochs=epochs)
    if batch_size > dataset_size:
        _checks.fail("at most `dataset_size`", batch_size=batch_size, dataset_size=dataset_size)
    steps, rate = epochs * (dataset_size // batch_size), batch_size / dataset_size

    def cost(noise_multiplier):
        event = accounting.dp_event(noise_multiplier, rate, steps)
        return accounting.epsilon(event, delta, accountant=accountant, neighbors=neighbors)

    return least_noise(cost, target_epsilon)


def least_noise(cost: Callable[[float], float], target_epsilon: float) -> float:
    """Finds the least noise multiplier with a cost of at most a target.

    Args:
        cost: epsilon as a function of sigma that does not increase.
        target_epsilon: above 0.

    Returns:
        sigma, at least 2^-10, to a relative 1e-5 and with `cost(sigma) <= target_epsilon`.

    Raises:
        ValueError: if `target_epsilon` is not positive, or is not reached at a sigma of 2^30.

    Example:
    >>> f"{least_noise(lambda sigma: 1 / sigma, 4.0):.4f}"
    '0.2500'
    """
    _checks.positive(target_epsilon=target_epsilon)
    enough = 1.0
    while cost(enough) > target_epsilon:
        enough *= 2
        if enough > 2**30:
            _checks.fail("within reach of some noise multiplier", target_epsilon=target_epsilon)
    too_little = enough / 2
    while enough <= 1 and too_little >= 2**-10 and cost(too_little) <= target_epsilon:
        enough, too_little = too_little, too_little / 2
    while too_little >= 2**-10 and enough / too_little > 1 + 1e-5:
        middle = math.sqrt(enough * too_little)
        enough, too_little = (middle, too_little) if cost(middle) <= target_epsilon else (enough, middle)
    return enough


def largest_count(cost: Callable[[int], float], limit: float, upper: int) -> int:
    """Finds the largest count whose cost is within a limit.

    Args:
        cost: a function of a count that does not decrease.
        limit: the most it may cost.
        upper: the largest count of interest.

    Returns:
        The count, from 0 (whatever 0 costs) to `upper`.

    Raises:
        ValueError: if `upper` is not an integer of at least 0.

    Example:
    >>> largest_count(lambda count: count**2, limit=10, upper=100)
    3
    """
    _checks.non_negative_integer(upper=upper)
    if cost(upper) <= limit:
        return upper
    within, beyond = 0, upper
    while beyond - within > 1:
        middle = (within + beyond) // 2
        within, beyond = (middle, beyond) if cost(middle) <= limit else (within, middle)
    return within
