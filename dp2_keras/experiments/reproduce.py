"""From a configuration to results: search if asked for, then all seeds, then figures and the report.

    cases -> (candidates -> winner of each case) -> cases x seeds -> summary
          -> <out>/<name>.{json,csv,png} and <out>/report.md

All rows are in `<out>/runs.jsonl`, whichever table they were made for, so that figures share runs and
nothing is run twice. Results of other tasks and methods that the table has already stay in it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from dp2_keras import _checks, accounting, calibration
from dp2_keras.experiments import methods, pool, report, search, summary, tasks
from dp2_keras.experiments.configuration import Case, Configuration
from dp2_keras.experiments.runs import Run
from dp2_keras.experiments.search import Choice
from dp2_keras.experiments.store import Store


@dataclasses.dataclass(frozen=True)
class Options:
    """How to reproduce.

    Args:
        out: the directory of results.
        data: the directory of the data; None downloads what can be.
        jobs: processes; None is one for each core.
        search: candidates for each method; 0 takes the configuration's hyper-parameters.
        refine: further runs for each method, around its winner; then, where it stands at the end of a list,
            up to `search.PAST_ENDS` more past it.
        halving: search by rounds, in which the worse candidates do not run to the end.
        seeds: how many; None is as the configuration says.
        epochs: instead of the configuration's.
        retry_failed: run again what failed.

    Raises:
        ValueError: for a value out of range.
    """

    out: str
    data: str | None = None
    jobs: int | None = None
    search: int = 0
    refine: int = 0
    halving: bool = False
    seeds: int | None = None
    epochs: int | None = None
    retry_failed: bool = False

    def __post_init__(self):
        _checks.non_negative_integer(search=self.search, refine=self.refine)
        for name, none in (("refine", 0), ("halving", False)):
            if getattr(self, name) and not self.search:
                _checks.fail(f"{none} without a `search`", **{name: getattr(self, name)})
        for name in ("jobs", "seeds", "epochs"):
            if getattr(self, name) is not None:
                _checks.positive_integer(**{name: getattr(self, name)})


def reproduce(configuration: Configuration, options: Options) -> dict[str, Any]:
    """Runs what is missing of a table or figure, and writes it.

    Args:
        configuration: what to make.
        options: where and how.

    Returns:
        The summary, as in `<out>/<name>.json`.

    Raises:
        ValueError: for a value out of range, or data that is not there.
        OSError: if a file cannot be read or written, or another sweep is at work in `out`.
    """
    _check_plots(configuration)
    cases = [_settled(case, options) for case in configuration.cases]
    with Store(os.path.join(options.out, "runs.jsonl")) as store:
        chosen = _searched(cases, store, options) if options.search else {}
        planned = [
            (case, chosen.get(_problem_of(case)), _runs(case, chosen, configuration, options))
            for case in cases
        ]
        _execute([run for _, _, runs in planned for run in runs], store, options)
        found = summary.summarize(configuration, planned, store, options)
        found = summary.joined(found, report.read(options.out, configuration.name), configuration.methods)
        summary.write_csv(found, store, os.path.join(options.out, f"{configuration.name}.csv"))
        report.write(found, options.out)
    return found


def _check_plots(configuration):
    """Before hours of runs, not after."""
    if configuration.plot is not None:
        try:
            from dp2_keras.experiments import plots  # noqa: F401
        except ImportError as error:
            raise RuntimeError("Figures need matplotlib: pip install 'dp2-keras[plots]'.") from error


def _settled(case: Case, options: Options) -> Case:
    """The case with a number for its noise, and the epochs that were asked for."""
    case = dataclasses.replace(case, epochs=options.epochs or case.epochs)
    if not methods.get(case.method).is_private:
        return dataclasses.replace(case, noise_multiplier=0.0)
    if case.match is None:
        return case
    return dataclasses.replace(case, noise_multiplier=_matched(case, options, **case.match))


def _matched(case, options, epochs, batch_size, noise_multiplier):
    """The noise, to four decimals, with which a case costs no more than another setting of the same data."""
    size, delta = tasks.load(case.task, options.data).size, tasks.get(case.task).delta
    steps = (options.epochs or epochs) * (size // batch_size)
    event = accounting.dp_event(noise_multiplier, batch_size / size, steps)
    target = accounting.epsilon(event, delta)
    sigma = calibration.calibrate_noise_multiplier(target, delta, size, case.batch_size, case.epochs)
    return math.ceil(sigma * 1e4) / 1e4


def _problem_of(case):
    """What is searched for once: cases that differ in a varied value share their search."""
    space = tuple((name, tuple(values)) for name, values in sorted(case.space.items()))
    return case.task, case.method, case.epochs, case.batch_size, case.noise_multiplier, space


def _has_a_choice(case):
    return bool(methods.get(case.method).space)


def _searched(cases: list[Case], store: Store, options: Options) -> dict[tuple, Choice]:
    """The winner of each search."""
    first = {}
    for case in filter(_has_a_choice, cases):
        first.setdefault(_problem_of(case), case)
    searches = [_search(case, options) for case in first.values()]
    fresh = [run for one in searches for run in one.runs]
    while fresh:
        _execute(fresh, store, options)
        fresh = [run for one in searches for run in one.next_runs(store)]
    return {problem: one.choice(store) for problem, one in zip(first, searches)}


class Search:
    """The runs of one search, and what they say.

    Args:
        case: what is searched for.
        grid: values by name.
        limits: (least, most) by name; see `methods.limits`.
        options: how many runs there may be.
    """

    def __init__(self, case: Case, grid: dict[str, list], limits: search.Limits, options: Options):
        self._case, self._grid, self._limits = case, grid, limits
        self._lengths = search.lengths(case.epochs) if options.halving else [case.epochs]
        self.runs = self._runs_of(search.candidates(grid, options.search))
        self._dropped = 0
        self._left_around, self._left_outwards = options.refine, search.PAST_ENDS if options.refine else 0

    def choice(self, store: Store) -> Choice | None:
        """The winner so far."""
        choice = search.choose(self._rows(store), self._problem, len(self.runs))
        if choice is None:
            return None
        runs, edges = len(self.runs) + self._dropped, tuple(self._outwards(choice.hyper, store))
        return dataclasses.replace(choice, runs=runs, dropped=self._dropped, edges=edges)

    def next_runs(self, store: Store) -> list[Run]:
        """What is to be run now that all `runs` are: the next round of a halving, then refinements."""
        return self._next_round(store) if self._lengths[1:] else self._refined(store)

    def _next_round(self, store):
        """The best of this round, with more epochs."""
        kept = search.survivors(self._rows(store), self._problem)
        self._dropped += len(self.runs) - len(kept)
        self._lengths = self._lengths[1:]
        self.runs = self._runs_of(kept)
        return self.runs

    def _refined(self, store):
        """The winner's neighbours while runs around it are left; then those further out than an end."""
        choice = self.choice(store)
        if choice is None:
            return []
        near = search.neighbours(choice.hyper, self._tried(store), self._limits)
        around = self._fresh(near)[: self._left_around]
        past = [] if around else list(self._outwards(choice.hyper, store).values())[: self._left_outwards]
        self._left_around, self._left_outwards = (
            self._left_around - len(around),
            self._left_outwards - len(past),
        )
        fresh = self._runs_of(around + past)
        self.runs = self.runs + fresh
        return fresh

    def _outwards(self, hyper, store):
        """By hyper-parameter the point further out than an end that it stands at, if that has not run."""
        found = search.outwards(hyper, self._grid, self._tried(store), self._limits)
        return {name: point for name, point in found.items() if self._fresh([point])}

    def _tried(self, store):
        """The lists, with all values that have been tried."""
        return search.widened(self._grid, [row["hyper"] for row in self._rows(store)])

    def _fresh(self, points):
        """Those that have not run; what failed is not run again."""
        done = {run.key for run in self.runs}
        return [point for point, run in zip(points, self._runs_of(points)) if run.key not in done]

    def _rows(self, store):
        return store.of([run.key for run in self.runs])

    @property
    def _problem(self):
        return tasks.get(self._case.task).problem

    def _runs_of(self, points):
        case = dataclasses.replace(self._case, epochs=self._lengths[0])
        return [_run(case, point, search.SEED) for point in points]


def _search(case, options):
    """Over the method's grid, within its limits."""
    data, fraction = tasks.load(case.task, options.data), methods.get(case.method).public_fraction
    public_rows = data.public_rows(fraction)
    steps_per_epoch = (data.size - public_rows) // case.batch_size
    limits = methods.limits(case.method, case.epochs * steps_per_epoch, public_rows)
    grid = methods.grid(case.method, tasks.get(case.task), steps_per_epoch, limits, **case.space)
    return Search(case, grid, limits, options)


def _runs(case, chosen, configuration, options):
    """The runs of a case, one for each seed; none if there are no hyper-parameters for it."""
    choice = chosen.get(_problem_of(case))
    stated = None if options.search and _has_a_choice(case) else case.hyper
    hyper = stated if choice is None else choice.hyper
    if hyper is None:
        return []
    extra = {"evaluations": configuration.evaluations, "probes": configuration.probes}
    seeds = range(options.seeds or configuration.seeds)
    return [_run(case, {**hyper, **case.varied}, seed, **extra) for seed in seeds]


def _run(case, hyper, seed, **extra):
    return Run(
        case.task, case.method, hyper, seed, case.epochs, case.batch_size, case.noise_multiplier, **extra
    )


def _execute(runs, store, options):
    pool.execute(runs, store, options.data, jobs=options.jobs, retry_failed=options.retry_failed)
