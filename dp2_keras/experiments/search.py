"""Random search over a grid, by a training metric.

    candidates = N points of the grid, drawn without replacement by a fixed seed, equally many for each method
    winner     = the candidate with the best training metric at the end of its run
    halving    = all candidates run a quarter of the epochs, the best third of them half, the best third of
                 those all: a quarter is a run of its own, with the noise of a step as in the whole
    refinement = the winner's neighbours, one step along each axis, past the ends of a list too, by name and
                 the lower first; again from a better one, while R runs last; then, while the winner stands
                 at an end of its list or past it, the next value outwards alone, with 8 runs at most
    next       = past an end of a list by its last ratio, but no further than a limit, such as the run's
                 steps for a delay; there is none past a limit, a count of 1 or next to a 0

as in the paper, which selects on training metrics too. Every candidate looks at the private data: EPSILON
OF THE WINNER DOES NOT COVER THE SEARCH. A winner is on an edge, and flagged, where it stands at an end of a
list or past it, not at a limit, and the next value outwards was not run. The search has a seed of its own,
so that the seeds that are reported had no part in the choice.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from dp2_keras import _checks
from dp2_keras.experiments.problems import Problem

SEED = 1_000
PAST_ENDS = 8

Limits = Mapping[str, tuple[float, float]]
_NO_LIMITS = (-math.inf, math.inf)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The result of a search.

    Attributes:
        hyper: the winner's hyper-parameters.
        runs: how many candidates there were.
        failed: how many of them failed or ended in NaN.
        train: the winner's training metric.
        edges: the hyper-parameters that stand at an end, of which the next value outwards was not run.
        dropped: how many of the candidates did not run to the end.
    """

    hyper: dict[str, Any]
    runs: int
    failed: int
    train: float
    edges: tuple[str, ...] = ()
    dropped: int = 0


def candidates(grid: Mapping[str, Sequence], count: int, seed: str | int = SEED) -> list[dict[str, Any]]:
    """Draws points of a grid.

    Args:
        grid: values by name.
        count: how many points; all of them if there are no more.
        seed: the same seed draws the same points, on every machine.

    Returns:
        Dicts, all different.

    Raises:
        ValueError: for a count that is not positive.

    Example:
    >>> candidates({"a": [1, 2], "b": [3]}, 5)
    [{'a': 2, 'b': 3}, {'a': 1, 'b': 3}]
    """
    _checks.positive_integer(count=count)
    total = math.prod(len(values) for values in grid.values())
    numbers = random.Random(f"dp2_keras search {seed}").sample(range(total), min(count, total))
    return [_point(grid, number) for number in numbers]


def _point(grid, number):
    point = {}
    for name, values in sorted(grid.items()):
        number, index = divmod(number, len(values))
        point[name] = values[index]
    return point


def neighbours(
    hyper: Mapping[str, Any], grid: Mapping[str, Sequence], limits: Limits
) -> list[dict[str, Any]]:
    """The points one step from a point along each axis; past its end, a list goes on by its last ratio.

    Args:
        hyper: the point.
        grid: the lists.
        limits: (least, most) by name, for those that have them.

    Example:
    >>> neighbours({"eps": 0.1, "delay": 4}, {"eps": [0.001, 0.01, 0.1], "delay": [4]}, limits={})
    [{'eps': 0.01, 'delay': 4}, {'eps': 1.0, 'delay': 4}]
    """
    return [
        {**hyper, name: near}
        for name, values in sorted(grid.items())
        for near in _beside(hyper[name], values, *limits.get(name, _NO_LIMITS))
    ]


def _beside(value, values, least, most):
    values = sorted(values)
    if len(values) < 2:
        return []
    index = values.index(value)
    below = values[index - 1] if index else _past(values[1], values[0], values)
    above = values[index + 1] if value < values[-1] else _past(values[-2], values[-1], values)
    return [near for near in (max(below, least), min(above, most)) if near != value]


def _past(before, end, values):
    """The value after an end; the end itself if there is none: a count is 1 at least, and 0 has no ratio."""
    if not (before and end):
        return end
    number = end * end / before
    if all(isinstance(value, int) for value in values):
        return max(1, round(number))
    return float(f"{number:.3g}")


def outwards(
    hyper: Mapping[str, Any], grid: Mapping[str, Sequence], tried: Mapping[str, Sequence], limits: Limits
) -> dict[str, dict[str, Any]]:
    """The neighbours that are further out than a value which stands at an end of its list or past it.

    Args:
        hyper: the point.
        grid: the lists.
        tried: the lists, with all values that have been tried.
        limits: as for `neighbours`.

    Returns:
        Points by the name of the hyper-parameter that is further out.

    Example:
    >>> grid = {"eps": [0.01, 0.1], "rate": [1, 2, 3]}
    >>> outwards({"eps": 0.1, "rate": 2}, grid, tried=grid, limits={})
    {'eps': {'eps': 1.0, 'rate': 2}}
    """
    found = {}
    for name, values in sorted(grid.items()):
        value = hyper[name]
        for near in _beside(value, tried[name], *limits.get(name, _NO_LIMITS)):
            if near > value >= max(values) or near < value <= min(values):
                found[name] = {**hyper, name: near}
    return found


def widened(grid: Mapping[str, Sequence], points: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """The grid with the values of some points.

    Example:
    >>> widened({"eps": [0.01, 0.1]}, [{"eps": 1.0}])
    {'eps': [0.01, 0.1, 1.0]}
    """
    return {name: sorted({*values, *(point[name] for point in points)}) for name, values in grid.items()}


def lengths(epochs: int) -> list[int]:
    """The epochs of each round of a search by halving.

    Example:
    >>> lengths(10), lengths(1)
    ([3, 5, 10], [1])
    """
    return sorted({math.ceil(epochs / part) for part in (4, 2, 1)})


def survivors(rows: Sequence[Mapping], problem: Problem) -> list[dict[str, Any]]:
    """The hyper-parameters of the best third, the best first; of those that have a metric.

    Args:
        rows: those that are done.
        problem: says which metric is better.
    """
    ranked = [(train, row["hyper"]) for row in rows if not math.isnan(train := _train(row))]
    ranked.sort(key=lambda pair: pair[0], reverse=problem.higher_is_better)
    return [hyper for _, hyper in ranked[: math.ceil(len(rows) / 3)]]


def _train(row):
    return float(row["curve"][-1]["train"])


def choose(rows: Sequence[Mapping], problem: Problem, runs: int) -> Choice | None:
    """The best of the candidates that ran.

    Args:
        rows: those that are done.
        problem: says which metric is better.
        runs: how many candidates there were.

    Returns:
        The `Choice`; None if no candidate has a metric.
    """
    best, kept = None, 0
    for row in rows:
        value = _train(row)
        kept += not math.isnan(value)
        if not math.isnan(value) and (best is None or problem.is_better(value, best[0])):
            best = (value, row["hyper"])
    if best is None:
        return None
    return Choice(best[1], runs, runs - kept, best[0])
