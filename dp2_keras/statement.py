"""What a training run guarantees, in words and as data.

    statement = words(facts(ledger, delta))

The facts are one dictionary of plain values, found here. The words are a function of it alone (see
`statement_text.py`), so that the text and the JSON document cannot disagree.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Iterable

import dp2_keras
from dp2_keras import _checks, statement_text
from dp2_keras.entries import PoissonSampling, ShuffledSampling
from dp2_keras.ledger import Ledger

ACCOUNTANTS = ("rdp", "pld")
NEIGHBORS = ("add_remove", "replace_one")

COVERED = {
    "weights": "The final weights, and all intermediate weights (checkpoints) of the counted steps, if they "
    "are released.",
    "derived": "The optimizer's state, and everything that is computed from the weights without looking at "
    "the training data again, such as predictions for other data.",
}

NOT_COVERED = {
    "training_metrics": "Training metrics: the loss, accuracy and other figures that Keras prints, logs or "
    "returns for the training data are exact functions of it, and so is what was decided by them (early "
    "stopping, choice of a checkpoint). Do not publish them.",
    "hyperparameter_search": "Hyper-parameter search: trying settings on the same data and keeping the best "
    "costs more than the run that was kept.",
    "repeated_runs": "Repeated runs: other runs on the same data, and other branches that continue from a "
    "checkpoint of this one. The costs of all that is released add up.",
    "held_out_data": "Held-out data: validation and test examples, and what was decided by results on them.",
    "preprocessing": "Preprocessing: vocabularies, idf weights, normalisation and whatever else `adapt()` or "
    "other code has fitted on private data.",
    "other_data": "Other data: what the weights had learnt before the counted steps, and examples that were "
    "declared public.",
    "lost_steps": "Lost steps: steps that ran after the last save and were lost in a crash, unless the run "
    "kept a `ledger_file`.",
    "floating_point": "Floating point: the proof is for real numbers and ideal Gaussian noise. Computers "
    "round, and draw pseudo-random numbers from a secret key.",
    "altered_records": "Altered records: the statement repeats what the model's ledger says. The ledger is "
    "not signed.",
}

_USERS = (
    "No bound on the number of examples of one person is known, and without one no guarantee for persons is "
    "possible. If each person gave at most k rows, group privacy turns (epsilon, delta) for one row into "
    "(k epsilon, delta (e^(k epsilon) - 1) / (e^epsilon - 1)) for one person."
)


@dataclasses.dataclass(frozen=True)
class Statement:
    """The facts of a privacy guarantee; `str` gives them in words.

    Made by `statement`.

    Args:
        facts: the facts, as `to_dict` gives them.
    """

    facts: dict

    def __str__(self):
        return statement_text.words(self.facts)

    def to_dict(self) -> dict:
        """The facts as plain values; infinity is `math.inf`."""
        return copy.deepcopy(self.facts)

    def to_json(self) -> str:
        """The facts as a JSON document; infinity, which JSON does not have, is the string "Infinity"."""
        return json.dumps(_finite(self.facts), indent=2, allow_nan=False)


def statement(
    ledger: Ledger,
    delta: float | None = None,
    *,
    accountant: str = "rdp",
    neighbors: str = "add_remove",
    notes: Iterable[str] = (),
) -> Statement:
    """States what the steps of a ledger guarantee, and what they do not.

    Args:
        ledger: what ran.
        delta: above 0 and below 1. Defaults to the largest power of ten not above 1 / n.
        accountant: "rdp" or "pld".
        neighbors: "add_remove" or "replace_one".
        notes: further sentences that the statement has to repeat. Defaults to none.

    Returns:
        The statement. `str` of it is the text, `to_dict` and `to_json` give the same facts.

    Raises:
        ValueError: for a value out of range, and if steps ran, `delta` is not given and no n is known.

    Guarantees: the first figure is proved for the sampling that was used, even if the ledger was told to
        price shuffled batches as Poisson samples; that price is given beside it, as assumed.

    Example:
    >>> from dp2_keras.entries import Entry, Mechanism
    >>> mechanism = Mechanism("DP2RMSprop", noise_multipliers=(1.0,), l2_norm_clips=(5.0, 0.5))
    >>> sampling = PoissonSampling(dataset_size=25_000, batch_size=64)
    >>> spent = statement(Ledger([Entry(mechanism, sampling, steps=39_000)]))
    >>> print(str(spent).split(":")[0])
    The training was differentially private
    >>> spent.to_dict()["delta"]
    1e-05
    """
    _check(delta, accountant, neighbors)
    entries = ledger.entries
    chosen = ledger.default_delta() if delta is None and entries else delta
    prices = _prices(entries, chosen, dict(accountant=accountant, neighbors=neighbors))
    verdict = _verdict(entries, prices["epsilon"])
    return Statement(
        {
            "library": "dp2_keras",
            "library_version": dp2_keras.__version__,
            "steps": ledger.steps,
            **verdict,
            **prices,
            **_delta_facts(delta, chosen, ledger.dataset_size),
            "accountant": accountant,
            "accountant_library": "dp-accounting",
            "accountant_version": importlib.metadata.version("dp-accounting"),
            "unit": "example",
            "max_examples_per_user": None,
            "user_level": _USERS,
            "neighbors": neighbors,
            "dataset_size": ledger.dataset_size,
            "microbatches": False,
            "entries": [_entry_facts(entry) for entry in entries],
            "covered": dict(COVERED) if verdict["guarantee"] else {},
            "not_covered": dict(NOT_COVERED),
            "notes": _notes(notes),
        }
    )


def _check(delta, accountant, neighbors):
    if delta is not None:
        _checks.open_unit(delta=delta)
    _checks.one_of(ACCOUNTANTS, accountant=accountant)
    _checks.one_of(NEIGHBORS, neighbors=neighbors)


def _prices(entries, delta, settings):
    """The proved epsilon, the assumed one where it differs, and the factors they stand for."""
    proved = Ledger(map(_without_opt_in, entries)).epsilon(delta, **settings)
    assumed = Ledger(entries).epsilon(delta, assumed=True, **settings)
    differs = any(isinstance(e.sampling, ShuffledSampling) for e in entries) and assumed != proved
    return {
        "epsilon": proved,
        "factor": _exp(proved),
        "epsilon_assumed": assumed if differs else None,
        "factor_assumed": _exp(assumed) if differs else None,
    }


def _without_opt_in(entry):
    if not getattr(entry.sampling, "assume_poisson", False):
        return entry
    return dataclasses.replace(entry, sampling=dataclasses.replace(entry.sampling, assume_poisson=False))


def _verdict(entries, epsilon):
    """Whether there is a guarantee, why not, and what it rests on."""
    noiseless = any(0 in e.mechanism.noise_multipliers for e in entries)
    reasons = {
        "nothing_ran": not entries,
        "noise_seeded": any(e.mechanism.seeded for e in entries),
        "sampling_seeded": any(getattr(e.sampling, "seeded", False) for e in entries),
        "no_noise": noiseless,
        "infinite": math.isinf(epsilon) and not noiseless,
    }
    own = [e.sampling for e in entries if getattr(e.sampling, "own_data", False)]
    assumptions = {
        "own_data": any(isinstance(sampling, ShuffledSampling) for sampling in own),
        "declared_poisson": any(isinstance(sampling, PoissonSampling) for sampling in own),
        "public_data": any(e.mechanism.public_data for e in entries),
    }
    return {
        "guarantee": not any(reasons.values()),
        "no_guarantee_because": [reason for reason, holds in reasons.items() if holds],
        "assumptions": [name for name, holds in assumptions.items() if holds],
        "assume_poisson": any(getattr(e.sampling, "assume_poisson", False) for e in entries),
    }


def _delta_facts(given, chosen, size):
    return {
        "delta": None if chosen is None else float(chosen),
        "delta_is_default": given is None,
        "delta_is_large": chosen is not None and size is not None and chosen > 1 / size,
    }


def _entry_facts(entry):
    return {
        "optimizer": _printable(entry.mechanism.optimizer),
        "noise_multipliers": list(entry.mechanism.noise_multipliers),
        "l2_norm_clips": list(entry.mechanism.l2_norm_clips),
        "noise_seeded": entry.mechanism.seeded,
        "public_data": entry.mechanism.public_data,
        "steps": entry.steps,
        **_sampling_facts(entry),
    }


def _sampling_facts(entry):
    sampling = entry.sampling
    size, batch_size = sampling.dataset_size, sampling.batch_size
    return {
        "sampling": _kind(sampling),
        "dataset_size": size,
        "batch_size": batch_size,
        "sampling_probability": batch_size / size if isinstance(sampling, PoissonSampling) else None,
        "max_batch_size": getattr(sampling, "max_batch_size", None),
        "sampling_seeded": getattr(sampling, "seeded", False),
        "own_data": getattr(sampling, "own_data", False),
        "ordered": getattr(sampling, "ordered", False),
        "assume_poisson": getattr(sampling, "assume_poisson", False),
        "epochs": entry.steps * batch_size / size if size else None,
        "passes": entry.passes,
    }


def _kind(sampling):
    if isinstance(sampling, PoissonSampling):
        return "poisson" if sampling.max_batch_size is None else "truncated_poisson"
    if isinstance(sampling, ShuffledSampling):
        return "own_data" if sampling.own_data else "shuffled"
    return "unknown"


def _notes(notes):
    notes = [notes] if isinstance(notes, str) else list(notes)
    for note in notes:
        if not isinstance(note, str):
            _checks.fail("sentences", notes=notes)
    return [_printable(note) for note in notes]


def _printable(text):
    """Text of unknown origin, without line breaks and control sequences."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _exp(epsilon):
    return math.exp(epsilon) if epsilon < 700 else math.inf


def _finite(value):
    """The value with infinities as strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return "Infinity" if isinstance(value, float) and math.isinf(value) else value
