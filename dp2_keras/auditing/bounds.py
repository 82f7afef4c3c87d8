"""Lower bounds on epsilon, from how well an attack tells apart what was trained on from what was not.

Of independent trials, t of the positives and f of the negatives were called positive; t_low and f_high are
Clopper and Pearson's bounds, each at half of the error allowed. An (epsilon, delta) mechanism has

    (rates)     epsilon >= ln( (t_low - delta) / f_high )  and  ln( (1 - f_high - delta) / (1 - t_low) )
    (f-DP)      1 - t_low >= f_s(f_high)       if it is T Poisson samples of Gaussians of noise s, of which
                f_s(a) = sup_e max(1 - delta_s(e) - e^e a,  e^-e (1 - delta_s(e) - a))

so that the second bound is epsilon(s), priced as the claim is, at the least s with 1 - t_low < f_s(f_high):
no mechanism of that noise, or of more, could be told apart so well. Of guesses made in *one run*, which need
not be independent, v of r are right, m canaries in all:

    (one run)   P(v or more) <= P(W >= v) + 2 m delta max_i P(v - i <= W < v) / i,
                W ~ Binomial(r, e^epsilon / (1 + e^epsilon))

References: Nasr et al., Tight Auditing of Differentially Private Machine Learning, arXiv:2302.07956 (f-DP);
Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, arXiv:2305.08846, Theorem 5.2.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from scipy import special, stats

from dp2_keras import _checks, accounting, calibration

_LARGEST = 50.0
_EXPONENTS = np.linspace(0.0, 25.0, 501)
_NOISE_STEPS, _NOISE_RANGE = 64, (1 / 32, 4.0)
_LARGEST_SEPARATION = 6.0  # In deviations. Loss distributions of less noise would take minutes.


@dataclasses.dataclass(frozen=True)
class Rates:
    """How often an attack said "in", in independent trials.

    Args:
        true_positives: of those that were in.
        positives: how many were in.
        false_positives: of those that were out.
        negatives: how many were out.

    Example:
    >>> f"{Rates(95, 100, 3, 100).epsilon(delta=1e-5, confidence=0.95):.2f}"
    '2.34'
    """

    true_positives: int
    positives: int
    false_positives: int
    negatives: int

    @classmethod
    def of(cls, called: np.ndarray, included: np.ndarray) -> Rates:
        """Counts calls of "in"."""
        counts = called & included, included, called & ~included, ~included
        return cls(*(int(np.sum(count)) for count in counts))

    def bounds(self, confidence: float) -> tuple[float, float]:
        """t_low and f_high, which hold together with the confidence."""
        _checks.open_unit(confidence=confidence)
        error = (1 - confidence) / 2
        misses = self.positives - self.true_positives
        return 1 - _largest_rate(misses, self.positives, error), _largest_rate(
            self.false_positives, self.negatives, error
        )

    def epsilon(self, delta: float, confidence: float) -> float:
        """The bound (rates) of the head of this file; 0 if the attack shows nothing."""
        t_low, f_high = self.bounds(confidence)
        return max(_log_ratio(t_low - delta, f_high), _log_ratio(1 - f_high - delta, 1 - t_low), 0.0)

    def gaussian_epsilon(
        self, noise_multiplier: float, rate: float, steps: int, delta: float, confidence: float
    ) -> float:
        """The bound (f-DP): epsilon at the least noise of a grid that is refuted.

        Args:
            noise_multiplier: sigma that is claimed; the grid goes from a 32nd of it to four times it.
            rate: q of the Poisson samples.
            steps: T.
            delta: of the epsilon returned.
            confidence: of the bound.

        Returns:
            Epsilon; 0 if no noise of the grid is refuted.
        """
        t_low, f_high = self.bounds(confidence)
        grid = [float(s) for s in noise_multiplier * np.geomspace(*_NOISE_RANGE, _NOISE_STEPS)]
        grid = [s for s in grid if _separation(s, rate, steps) <= _LARGEST_SEPARATION]
        refuted = lambda k: 1 - t_low < trade_off(grid[k - 1], rate, steps, f_high)  # noqa: E731
        stand = calibration.largest_count(refuted, 0, len(grid)) if grid else 0
        if stand == len(grid):
            return 0.0
        return accounting.epsilon(accounting.dp_event(grid[stand], rate, steps), delta)


def one_run_epsilon(correct: int, guesses: int, canaries: int, delta: float, confidence: float) -> float:
    """The bound (one run) of the head of this file.

    Args:
        correct: v, how many guesses were right.
        guesses: r, how many were made.
        canaries: m, how many canaries had a coin thrown for them.
        delta: of the claim.
        confidence: of the bound.

    Returns:
        The largest epsilon that is refuted; 0 if none is.

    Example:
    >>> f"{one_run_epsilon(100, 100, 1000, delta=1e-5, confidence=0.95):.2f}"
    '3.47'
    """
    _checks.open_unit(confidence=confidence)
    low, high = 0.0, _LARGEST
    if _chance(correct, guesses, canaries, delta, low) > 1 - confidence:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        refuted = _chance(correct, guesses, canaries, delta, middle) <= 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low


def _chance(correct, guesses, canaries, delta, epsilon):
    """The most likely it can be that so many guesses are right."""
    right = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    below = np.cumsum(right.pmf(np.arange(correct - 1, -1, -1)))  # P(v - i <= W < v), i = 1, 2, ...
    slack = np.max(below / np.arange(1, correct + 1), initial=0.0)
    return min(1.0, float(right.sf(correct - 1)) + 2 * canaries * delta * float(slack))


def trade_off(noise_multiplier: float, rate: float, steps: int, false_positive_rate: float) -> float:
    """f_s(a): the least rate of misses that any test of that false positive rate can have.

    Example:
    >>> f"{trade_off(1.0, 1.0, 1, 0.1):.2f}"  # Of one Gaussian: Phi(Phi^-1(0.9) - 1).
    '0.61'
    """
    deltas = _deltas(noise_multiplier, rate, steps)
    powers = np.exp(_EXPONENTS)
    left = 1 - deltas - powers * false_positive_rate
    right = (1 - deltas - false_positive_rate) / powers
    return float(max(left.max(), right.max(), 0.0))


@functools.lru_cache(maxsize=1024)
def _deltas(noise_multiplier, rate, steps):
    step = privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=rate, value_discretization_interval=1e-3
    )
    return np.asarray(step.self_compose(steps).get_delta_for_epsilon(list(_EXPONENTS)))


def _separation(noise_multiplier, rate, steps):
    """About how many deviations apart the two answers are, by the central limit theorem."""
    exponent = noise_multiplier**-2
    return rate * math.sqrt(steps * math.expm1(exponent)) if exponent < 50 else math.inf


def _largest_rate(count, trials, error):
    """Clopper and Pearson's upper bound."""
    return 1.0 if count >= trials else float(special.betaincinv(count + 1, trials - count, 1 - error))


def _log_ratio(above, below):
    if above <= 0:
        return 0.0
    return math.log(above / below) if below > 0 else _LARGEST
