"""What ran, so that it can be priced.

    ledger  = sum of entries,   entry = (mechanism, sampling) x steps
    epsilon = price of every entry's releases, composed

Steps have an origin, a random name of whoever took them. Two ledgers that meet may have a part of their
history in common, so of each origin the larger count is taken, and the origins are added up:

    joined[origin] = max(one[origin], other[origin])

What an entry is made of stands in `entries.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

from dp2_keras import _checks, accounting, calibration
from dp2_keras.entries import Entry, Mechanism, ceil_div, entry_from_dict, entry_to_dict

LEDGER_NAME = "dp2_keras_ledger"
VERSION = 1


class Ledger:
    """The steps that ran, added up; its price is that of what ran.

    A run is opened by `begin`, told its total of steps by `advance`, and ended by `close` (or by the
    next `begin`). The open run counts at once.

    Iterating over a ledger gives its entries apart by origin.

    Args:
        entries: what ran before. Defaults to nothing.
        origin: who takes the steps of its own runs. Defaults to an unknown one.

    Example:
    >>> from dp2_keras.entries import PoissonSampling
    >>> ledger = Ledger()
    >>> mechanism = Mechanism("DP2RMSprop", noise_multipliers=(1.0,), l2_norm_clips=(5.0, 0.5))
    >>> ledger.begin(mechanism, PoissonSampling(dataset_size=25_000, batch_size=64))
    >>> ledger.advance(39_000)
    >>> f"{ledger.epsilon(delta=1e-5):.2f}"
    '3.03'
    >>> Ledger.from_json(ledger.to_json()) == ledger
    True
    """

    def __init__(self, entries: Iterable[Entry] = (), origin: str = ""):
        self.origin = origin
        self._closed = _added(entries)
        self._run = None
        self._run_steps = 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        """One entry for each mechanism and sampling, in the order of first appearance."""
        return _added(dataclasses.replace(entry, origin="") for entry in self)

    def __iter__(self):
        if not self._run_steps:
            return iter(self._closed)
        return iter(_added((*self._closed, Entry.of_run(*self._run, self._run_steps, self.origin))))

    @property
    def steps(self) -> int:
        """How many steps ran."""
        return sum(entry.steps for entry in self.entries)

    @property
    def dataset_size(self) -> int | None:
        """The largest public n of the entries, for the strictest default delta; None if none is known."""
        return max((e.sampling.dataset_size for e in self.entries if e.sampling.dataset_size), default=None)

    def begin(self, mechanism: Mechanism, sampling) -> None:
        """Opens a run. Nothing is counted yet; a run that was left open is closed."""
        self.close()
        self._run = (mechanism, sampling)

    def advance(self, steps: int) -> None:
        """Counts the open run.

        Args:
            steps: the run's total so far.

        Raises:
            ValueError: if no run is open, or the total would decrease.
        """
        _checks.non_negative_integer(steps=steps)
        if self._run is None:
            raise ValueError("`advance` needs an open run: call `begin` first.")
        if steps < self._run_steps:
            _checks.fail(f"at least the {self._run_steps} steps that the open run has had", steps=steps)
        self._run_steps = int(steps)

    def close(self) -> None:
        """Ends the open run, if there is one, and keeps its steps."""
        self._closed, self._run, self._run_steps = tuple(self), None, 0

    def epsilon(
        self,
        delta: float | None = None,
        *,
        accountant: str = "rdp",
        neighbors: str = "add_remove",
        assumed: bool = False,
    ) -> float:
        """The price of all that ran.

        Args:
            delta: above 0 and below 1. Defaults to `accounting.default_delta` of `dataset_size`.
            accountant: "rdp" or "pld".
            neighbors: "add_remove" or "replace_one".
            assumed: whether to price shuffled batches as if they had been Poisson samples, which is not
                proved. Defaults to False: the proved figure.

        Returns:
            Epsilon; 0 if nothing ran.

        Raises:
            ValueError: for a value out of range, and if `delta` is needed because no n is known.
        """
        if not self.entries:
            return 0.0
        delta = self.default_delta() if delta is None else delta
        releases = [entry.releases(assumed) for entry in self.entries]
        return accounting.price(releases, delta, accountant=accountant, neighbors=neighbors)

    def default_delta(self) -> float:
        """The usual delta for `dataset_size`.

        Raises:
            ValueError: if no n is known; it names `delta`.
        """
        if self.dataset_size is None:
            raise ValueError("`delta` must be given: the ledger knows no dataset size to choose it by.")
        return accounting.default_delta(self.dataset_size)

    def allowed_steps(
        self,
        mechanism: Mechanism,
        sampling,
        epsilon: float,
        delta: float,
        *,
        accountant: str = "rdp",
        neighbors: str = "add_remove",
        upper: int,
    ) -> int:
        """How many steps of a new run may follow what ran.

        Args:
            mechanism: what a step of the new run releases.
            sampling: how its batches are drawn.
            epsilon: the most that everything together may cost.
            delta: above 0 and below 1.
            accountant: "rdp" or "pld".
            neighbors: "add_remove" or "replace_one".
            upper: the most steps of interest.

        Returns:
            The largest count up to `upper` whose price with what ran is at most `epsilon`, or 0.

        Raises:
            ValueError: for a value out of range.
        """

        def cost(steps):
            run = [Entry.of_run(mechanism, sampling, steps)] if steps else []
            return self.merged(run).epsilon(delta, accountant=accountant, neighbors=neighbors)

        return calibration.largest_count(cost, epsilon, upper)

    def merged(self, other: Iterable[Entry]) -> Ledger:
        """A ledger of the steps of both."""
        return Ledger((*self, *other))

    def beyond(self, other: Iterable[Entry]) -> Ledger:
        """A ledger of the steps here that `other` has not counted."""
        counted = {entry.key: entry for entry in Ledger(other)}
        missing = (_difference(entry, counted.get(entry.key)) for entry in self)
        return Ledger(entry for entry in missing if entry)

    def joined(self, other: Ledger) -> Ledger:
        """A ledger that covers both, and counts once what they have in common."""
        return self.merged(other.beyond(self))

    def covers(self, other: Iterable[Entry]) -> bool:
        """Whether every step of `other` is counted here."""
        return not Ledger(other).beyond(self).entries

    def copy(self) -> Ledger:
        """A ledger of the same steps, without an open run."""
        return Ledger(self)

    def to_json(self) -> str:
        """All entries as a JSON document; an open run is written as if closed."""
        return json.dumps({"version": VERSION, "entries": [entry_to_dict(entry) for entry in self]})

    @classmethod
    def from_json(cls, document: str) -> Ledger:
        """Reads what `to_json` wrote.

        Args:
            document: the text.

        Returns:
            The ledger, without an open run.

        Raises:
            ValueError: for anything that `to_json` could not have written.
        """
        try:
            fields = json.loads(document)
            if not isinstance(fields, dict) or fields.keys() != {"version", "entries"}:
                raise ValueError("it must have the fields `version` and `entries`")
            if fields["version"] != VERSION:
                _checks.fail(f"{VERSION}, the only one known", version=fields["version"])
            return cls([entry_from_dict(entry) for entry in fields["entries"]])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"This is not a ledger that can be trusted: {error}") from error

    def __eq__(self, other):
        return isinstance(other, Ledger) and set(self.entries) == set(other.entries)

    def __repr__(self):
        return f"Ledger({list(self.entries)!r})"


def _added(entries):
    """Entries with the steps of equal mechanism and sampling summed."""
    sums = {}
    for entry in entries:
        steps, passes = sums.get(entry.key, (0, 0))
        sums[entry.key] = steps + entry.steps, passes + (entry.passes or 0)
    return tuple(
        Entry(mechanism, sampling, steps, passes or None, origin)
        for (mechanism, sampling, origin), (steps, passes) in sums.items()
    )


def _difference(entry, counted):
    """The least entry that brings `counted` to the steps and passes of `entry`; None if it has them."""
    if counted is None:
        return entry
    steps, passes = entry.steps - counted.steps, (entry.passes or 0) - (counted.passes or 0)
    if steps <= 0 and passes <= 0:
        return None
    steps = max(steps, passes, 1)
    if entry.passes is None:
        return dataclasses.replace(entry, steps=steps)
    passes = max(passes, ceil_div(steps, entry.sampling.steps_per_pass))
    return dataclasses.replace(entry, steps=steps, passes=passes)
