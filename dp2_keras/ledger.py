"""What ran, so that it can be priced.

    ledger  = sum of entries,   entry = (mechanism, sampling) x steps
    epsilon = price of every entry's releases, composed

    sampling   what one entry releases
    Poisson    Sampled(B / n, Gaussian(sigma)), once a step
    Shuffled   Gaussian(sigma), once for each pass over the data that was started
    Unknown    Gaussian(sigma), once a step

Steps have an origin, a random name of whoever took them. Two ledgers that meet may have a part of their
history in common, so of each origin the larger count is taken, and the origins are added up:

    joined[origin] = max(one[origin], other[origin])

A ledger holds no private data and no key: counts of steps, and the public settings they ran under.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable

import dp_accounting

from dp2_keras import _checks, accounting

LEDGER_NAME = "dp2_keras_ledger"
VERSION = 1
MAX_STEPS = 2**62


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """What one step releases: Gaussian sums over its batch.

    Args:
        optimizer: name of the optimizer's class.
        noise_multipliers: sigma of each release on one batch, at least 0; normally one.
        l2_norm_clips: the clipping norms of the phases. The price does not depend on them.
        seeded: whether the noise came from a given seed: then there are figures, and no guarantee.
        public_data: whether data that was declared public had a part in the step, beside the sums.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> Mechanism("DP2RMSprop", noise_multipliers=(2.0, 2.0), l2_norm_clips=(5.0, 0.5)).event
    GaussianDpEvent(noise_multiplier=1.414...)
    """

    optimizer: str
    noise_multipliers: tuple[float, ...]
    l2_norm_clips: tuple[float, ...]
    seeded: bool = False
    public_data: bool = False

    def __post_init__(self):
        _checks.text(optimizer=self.optimizer)
        _checks.boolean(seeded=self.seeded, public_data=self.public_data)
        _checks.each(_checks.non_negative, noise_multipliers=self.noise_multipliers)
        _checks.each(_checks.clip_norm, l2_norm_clips=self.l2_norm_clips)
        _set_plain(self, "noise_multipliers", "l2_norm_clips")

    @property
    def event(self) -> dp_accounting.GaussianDpEvent:
        """All releases of a step as one Gaussian."""
        return accounting.gaussian(*self.noise_multipliers)


@dataclasses.dataclass(frozen=True)
class PoissonSampling:
    """Each example is in each batch with probability B / n, independently.

    Args:
        dataset_size: n, the public number of examples.
        batch_size: B, the expected batch size, at most n.
        max_batch_size: larger draws are cut to a random subset of this size. Defaults to none.
        seeded: whether the batches were drawn from a given seed.
        own_data: whether the batches came from the user, who declared them to be Poisson samples.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> PoissonSampling(dataset_size=25_000, batch_size=64).sampling_probability
    0.00256
    """

    dataset_size: int
    batch_size: int
    max_batch_size: int | None = None
    seeded: bool = False
    own_data: bool = False

    def __post_init__(self):
        _checks.positive_integer(dataset_size=self.dataset_size, batch_size=self.batch_size)
        _checks.boolean(seeded=self.seeded, own_data=self.own_data)
        if self.max_batch_size is not None:
            _checks.positive_integer(max_batch_size=self.max_batch_size)
        if self.batch_size > self.dataset_size:
            _checks.fail("at most `dataset_size`", batch_size=self.batch_size, dataset_size=self.dataset_size)
        _set_plain(self, "dataset_size", "batch_size", "max_batch_size")

    @property
    def sampling_probability(self) -> float:
        """q = B / n."""
        return self.batch_size / self.dataset_size

    def passes(self, steps: int) -> None:
        """None: no example is sure to be used."""

    def releases(self, event, steps, passes, assumed=False):
        """The event of a step, and how often it happened."""
        rate, size, limit = self.sampling_probability, self.dataset_size, self.max_batch_size
        return accounting.poisson_sampled(event, rate, dataset_size=size, max_batch_size=limit), steps


@dataclasses.dataclass(frozen=True)
class ShuffledSampling:
    """Each example is used at most once in a pass over the data, of ceil(n / B) steps.

    Args:
        dataset_size: n, the public number of examples.
        batch_size: B.
        own_data: whether the batches came from the user, so that one use in a pass is an assumption.
        streamed: whether they went on from epoch to epoch, or an epoch had more than a pass, so that a pass
            may start within a batch and has no more than n // B whole ones.
        assume_poisson: whether the user asked for the price of Poisson sampling, unproved here.
        ordered: whether they came in the data's own order, so that nothing can be assumed of them.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> ShuffledSampling(dataset_size=25_000, batch_size=64).passes(391)
    1
    """

    dataset_size: int
    batch_size: int
    own_data: bool = False
    assume_poisson: bool = False
    streamed: bool = False
    ordered: bool = False

    def __post_init__(self):
        _checks.positive_integer(dataset_size=self.dataset_size, batch_size=self.batch_size)
        _checks.boolean(own_data=self.own_data, assume_poisson=self.assume_poisson)
        _checks.boolean(streamed=self.streamed, ordered=self.ordered)
        _set_plain(self, "dataset_size", "batch_size")

    @property
    def sampling_probability(self) -> float:
        """The rate that Poisson sampling would have: B / n, at most 1."""
        return min(1.0, self.batch_size / self.dataset_size)

    @property
    def steps_per_pass(self) -> int:
        """ceil(n / B)."""
        return _ceil_div(self.dataset_size, self.batch_size)

    @property
    def one_pass(self) -> tuple[int, int] | None:
        """(k, n) if up to k steps are counted as one pass, which then must not have more than n examples."""
        return None if self.streamed else (self.steps_per_pass, self.dataset_size)

    def passes(self, steps: int) -> int:
        """Passes started in `steps` steps of one run: the most often that one example was used.

        An epoch of `fit` is a run of its own, because each starts a pass anew.
        """
        if not self.own_data or (steps <= self.steps_per_pass and not self.streamed):
            return _ceil_div(steps, self.steps_per_pass)
        return _ceil_div(steps, max(1, self.dataset_size // self.batch_size))

    def releases(self, event, steps, passes, assumed=False):
        """The event and how often it happened; `assumed` prices it as Poisson sampling."""
        if self.assume_poisson or (assumed and not self.ordered):
            return accounting.poisson_sampled(event, self.sampling_probability), steps
        return event, passes


@dataclasses.dataclass(frozen=True)
class UnknownSampling:
    """Nothing is known of the batches (`train_on_batch`): any example may be in each.

    Args:
        batch_size: B. Defaults to unknown.

    Raises:
        ValueError: if `batch_size` is not a positive integer.
    """

    batch_size: int | None = None
    dataset_size = None

    def __post_init__(self):
        if self.batch_size is not None:
            _checks.positive_integer(batch_size=self.batch_size)
        _set_plain(self, "batch_size")

    def passes(self, steps: int) -> None:
        """None: every step may use an example."""

    def releases(self, event, steps, passes, assumed=False):
        """The event of a step, and how often it happened."""
        return event, steps


_SAMPLINGS = {"poisson": PoissonSampling, "shuffled": ShuffledSampling, "unknown": UnknownSampling}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Steps of one mechanism under one sampling, over all their runs.

    Args:
        mechanism: what a step released.
        sampling: how its batch was drawn.
        steps: how many ran, at least 1.
        passes: passes over the data that were started, summed over the runs; None unless shuffled.
        origin: who took the steps. Defaults to an unknown one.

    Raises:
        ValueError: for a value out of range, and for `passes` that `steps` cannot have had.
    """

    mechanism: Mechanism
    sampling: PoissonSampling | ShuffledSampling | UnknownSampling
    steps: int
    passes: int | None = None
    origin: str = ""

    def __post_init__(self):
        _checks.positive_integer(steps=self.steps)
        if not isinstance(self.origin, str):
            _checks.fail("a text", origin=self.origin)
        if self.steps > MAX_STEPS:
            _checks.fail(f"at most {MAX_STEPS}", steps=self.steps)
        if isinstance(self.sampling, ShuffledSampling):
            _checks.positive_integer(passes=self.passes)
            if not _ceil_div(self.steps, self.sampling.steps_per_pass) <= self.passes <= self.steps:
                _checks.fail("possible for the steps", passes=self.passes, steps=self.steps)
        elif self.passes is not None:
            _checks.fail("None unless the batches are shuffled", passes=self.passes)
        _set_plain(self, "steps", "passes")

    @classmethod
    def of_run(cls, mechanism, sampling, steps, origin="") -> Entry:
        """The entry of one run."""
        return cls(mechanism, sampling, steps, sampling.passes(steps), origin)

    @property
    def key(self):
        """What entries that can be added have in common."""
        return self.mechanism, self.sampling, self.origin

    def releases(self, assumed: bool = False) -> tuple[dp_accounting.DpEvent, int]:
        """What the entry released, for `accounting.price`: an event and a count."""
        return self.sampling.releases(self.mechanism.event, self.steps, self.passes, assumed)


class Ledger:
    """The steps that ran, added up; its price is that of what ran.

    A run is opened by `begin`, told its total of steps by `advance`, and ended by `close` (or by the
    next `begin`). The open run counts at once.

    Iterating over a ledger gives its entries apart by origin.

    Args:
        entries: what ran before. Defaults to nothing.
        origin: who takes the steps of its own runs. Defaults to an unknown one.

    Example:
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

        return accounting.largest_count(cost, epsilon, upper)

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
        return json.dumps({"version": VERSION, "entries": [_entry_to_dict(entry) for entry in self]})

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
            return cls([_entry_from_dict(entry) for entry in fields["entries"]])
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
    passes = max(passes, _ceil_div(steps, entry.sampling.steps_per_pass))
    return dataclasses.replace(entry, steps=steps, passes=passes)


def _entry_to_dict(entry):
    kind = next(kind for kind, sampling in _SAMPLINGS.items() if isinstance(entry.sampling, sampling))
    fields = dataclasses.asdict(entry)
    # JSON has no infinity: a mechanism without clipping says so by null.
    clips = [None if math.isinf(clip) else clip for clip in entry.mechanism.l2_norm_clips]
    return {
        **fields,
        "mechanism": {**fields["mechanism"], "l2_norm_clips": clips},
        "sampling": {"kind": kind, **fields["sampling"]},
    }


def _entry_from_dict(fields):
    mechanism, sampling = dict(fields["mechanism"]), dict(fields["sampling"])
    mechanism["l2_norm_clips"] = [math.inf if c is None else c for c in mechanism["l2_norm_clips"]]
    kind = _SAMPLINGS[sampling.pop("kind")]
    return Entry(**{**fields, "mechanism": Mechanism(**mechanism), "sampling": kind(**sampling)})


def _set_plain(record, *names):
    """Makes numbers plain Python's, so that equal settings are equal entries and can be written as JSON."""
    for name in names:
        value = getattr(record, name)
        if value is not None:
            value = int(value) if not isinstance(value, (tuple, list)) else tuple(map(float, value))
        object.__setattr__(record, name, value)


def _ceil_div(numerator, denominator):
    return -(-numerator // denominator)
