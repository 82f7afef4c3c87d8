"""Records of a ledger: what a step releases, how its batch was drawn, and how many such steps ran.

    sampling   what one entry releases
    Poisson    Sampled(B / n, Gaussian(sigma)), once a step
    Shuffled   Gaussian(sigma), once for each pass over the data that was started
    Unknown    Gaussian(sigma), once a step

They hold no private data and no key: counts of steps, and the public settings they ran under.
"""

from __future__ import annotations

import dataclasses
import math

import dp_accounting

from dp2_keras import _checks, accounting

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
        return ceil_div(self.dataset_size, self.batch_size)

    @property
    def one_pass(self) -> tuple[int, int] | None:
        """(k, n) if up to k steps are counted as one pass, which then must not have more than n examples."""
        return None if self.streamed else (self.steps_per_pass, self.dataset_size)

    def passes(self, steps: int) -> int:
        """Passes started in `steps` steps of one run: the most often that one example was used.

        An epoch of `fit` is a run of its own, because each starts a pass anew.
        """
        if not self.own_data or (steps <= self.steps_per_pass and not self.streamed):
            return ceil_div(steps, self.steps_per_pass)
        return ceil_div(steps, max(1, self.dataset_size // self.batch_size))

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
            if not ceil_div(self.steps, self.sampling.steps_per_pass) <= self.passes <= self.steps:
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


def entry_to_dict(entry: Entry) -> dict:
    """An entry as plain data, for JSON."""
    kind = next(kind for kind, sampling in _SAMPLINGS.items() if isinstance(entry.sampling, sampling))
    fields = dataclasses.asdict(entry)
    # JSON has no infinity: a mechanism without clipping says so by null.
    clips = [None if math.isinf(clip) else clip for clip in entry.mechanism.l2_norm_clips]
    return {
        **fields,
        "mechanism": {**fields["mechanism"], "l2_norm_clips": clips},
        "sampling": {"kind": kind, **fields["sampling"]},
    }


def entry_from_dict(fields: dict) -> Entry:
    """What `entry_to_dict` wrote."""
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


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient of integers, rounded up."""
    return -(-numerator // denominator)
