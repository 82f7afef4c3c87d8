"""What a training run guarantees, in words and as data.

    statement = words(facts(ledger, delta))

The facts are one dictionary of plain values. The words are a function of it alone, so that the text
and the JSON document cannot disagree. Epsilon is rounded up in the text, never down.
"""

from __future__ import annotations

import copy
import dataclasses
import decimal
import importlib.metadata
import json
import math
import textwrap
from collections.abc import Iterable

import dp2_keras
from dp2_keras import _checks
from dp2_keras.entries import PoissonSampling, ShuffledSampling
from dp2_keras.ledger import Ledger

ACCOUNTANTS = ("rdp", "pld")
NEIGHBORS = ("add_remove", "replace_one")
WIDTH = 88

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

_UNIT = (
    "One example: one row of the training data. Not protected as a whole: a person who gave several rows, or "
    "a fact that is found in several rows."
)
_RELATIONS = {
    "add_remove": "Two data sets are neighbours if one is the other with one example added or removed. The "
    "number of examples is public: a missing example counts as a row that contributes nothing (zero-out).",
    "replace_one": "Two data sets are neighbours if they have equally many examples and one example is "
    "replaced by another (replace-one). The number of examples is public.",
}
_WITHOUT = {"add_remove": "without it", "replace_one": "with any other example in its place"}
_USERS = (
    "No bound on the number of examples of one person is known, and without one no guarantee for persons is "
    "possible. If each person gave at most k rows, group privacy turns (epsilon, delta) for one row into "
    "(k epsilon, delta (e^(k epsilon) - 1) / (e^epsilon - 1)) for one person."
)
_NO_GUARANTEE = {
    "nothing_ran": "Nothing was trained: the ledger holds no step. Nothing is spent, and nothing is said of "
    "how the weights came to be.",
    "noise_seeded": "The noise came from a given seed: whoever knows or guesses the seed can take the noise "
    "away.",
    "sampling_seeded": "The batches were drawn from a given seed: whoever knows or guesses the seed knows "
    "who was in each batch.",
    "no_noise": "At least one step added no noise: epsilon is infinite.",
    "infinite": "No finite epsilon can be proved at this delta: epsilon is infinite.",
}
_ASSUMPTIONS = {
    "own_data": "The batches came from a data set of the user's own. It is assumed, and was not checked, "
    "that no example occurs more than once in a pass, which is as many examples in a row as the data set was "
    "declared to have, nor twice in one batch (repeat batches, do not batch repeats). If that is not so, the "
    "figures do not hold.",
    "declared_poisson": "Some batches came from the user, who declared them to be Poisson samples drawn in "
    "secret: every example in each batch with the stated probability, independently. That was not checked. "
    "If it is not so, the figures do not hold.",
    "public_data": "Data that was declared public, or statistics of such data, had a part in the training, "
    "without clipping and without noise. It is assumed, and was not checked, that it holds nothing of the "
    "protected examples, and was not chosen or computed by looking at them. If that is not so, the figures "
    "do not hold.",
}


@dataclasses.dataclass(frozen=True)
class Statement:
    """The facts of a privacy guarantee; `str` gives them in words.

    Made by `statement`.

    Args:
        facts: the facts, as `to_dict` gives them.
    """

    facts: dict

    def __str__(self):
        return _text(self.facts)

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


def round_up(value: float, places: int = 5) -> str:
    """A number in decimals, rounded up, so that what is printed is never below what was proved.

    Args:
        value: at least 0; may be infinite.
        places: decimals. Defaults to 5.

    Returns:
        The decimals, or "infinity".

    Example:
    >>> round_up(3.030441), round_up(1e-9), round_up(math.inf)
    ('3.03045', '0.00001', 'infinity')
    """
    if math.isinf(value):
        return "infinity"
    step = decimal.Decimal(1).scaleb(-places)
    context = decimal.Context(prec=400)
    return str(decimal.Decimal(value).quantize(step, decimal.ROUND_CEILING, context))


# Facts.


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


# Words.


def _text(facts):
    sections = [
        ("", _result(facts)),
        ("What is protected" if facts["guarantee"] else "What a guarantee would protect", [_UNIT]),
        ("Neighbouring data sets", [_RELATIONS[facts["neighbors"]]]),
        ("What was done", [_run(entry) for entry in facts["entries"]]),
        ("Figures", _figures(facts)),
        ("Assumptions", _assumptions(facts)),
        ("Covered", list(facts["covered"].values())),
        ("Persons", [facts["user_level"]]),
        ("Not covered", list(facts["not_covered"].values())),
        ("Notes", facts["notes"]),
    ]
    return "\n\n".join(_section(title, items) for title, items in sections if items)


def _section(title, items):
    if not title:
        return "\n\n".join(_wrapped(item) for item in items)
    lines = (_wrapped(item, initial_indent="  - ", subsequent_indent="    ") for item in items)
    return "\n".join([f"{title}:", *lines])


def _wrapped(text, **indents):
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False, **indents)


def _result(facts):
    if facts["guarantee"]:
        return [f"The training was differentially private: {_claim(facts)}.", _meaning(facts)]
    reasons = " ".join(_NO_GUARANTEE[reason] for reason in facts["no_guarantee_because"])
    seeded = {"noise_seeded", "sampling_seeded"} & set(facts["no_guarantee_because"])
    hypothetical = " The figures below are what the run would have cost without the seed." if seeded else ""
    return [f"NO GUARANTEE. {reasons}{hypothetical}"]


def _claim(facts):
    several = len(facts["assumptions"]) > 1
    holds = "assumptions below hold" if several else "assumption below holds"
    condition = f", if the {holds}" if facts["assumptions"] else ""
    return (
        f"epsilon = {round_up(facts['epsilon'])} at delta = {facts['delta']!r}, for one example of the "
        f"training data{condition}"
    )


def _meaning(facts):
    return (
        "In words: whatever is looked for in the released weights, the chance of finding it with a given "
        f"example in the training data is at most {_factor(facts['factor'])} times (e^epsilon) the chance "
        f"{_WITHOUT[facts['neighbors']]}, plus delta; and the other way round."
    )


def _run(entry):
    seed = " The noise came from a given seed." if entry["noise_seeded"] else ""
    public = " The steps also used public data." if entry["public_data"] else ""
    done = f"{entry['steps']:,} steps of {entry['optimizer']}. {_mechanism(entry)}{seed}{public}"
    return f"{done} {_sampling(entry)}"


def _mechanism(entry):
    noise = entry["noise_multipliers"]
    released = f"{len(noise)} sums of the same batch" if len(noise) > 1 else "a sum over the batch"
    multipliers = " and ".join(map(repr, noise))
    return (
        f"Mechanism: the contribution of each single example (no microbatches) was {_clipping(entry)}, and "
        f"each step released {released} with {'NO' if 0 in noise else 'Gaussian'} noise (noise multiplier "
        f"{multipliers}: the standard deviation of the noise over the most that one example can add)."
    )


def _clipping(entry):
    clips = entry["l2_norm_clips"]
    if all(map(math.isinf, clips)):
        return "not clipped"
    phases = ", depending on the phase" if len(clips) > 1 else ""
    norms = " or ".join("infinity" if math.isinf(clip) else repr(clip) for clip in clips)
    return f"clipped to an L2 norm of at most {norms}{phases}"


def _sampling(entry):
    words = {
        "poisson": _poisson,
        "truncated_poisson": _truncated,
        "shuffled": _shuffled,
        "own_data": _own_data,
        "unknown": _unknown,
    }
    return f"Sampling: {words[entry['sampling']](entry)}"


def _poisson(entry):
    source = "from a given seed" if entry["sampling_seeded"] else "in secret"
    origin = "Poisson batches of the user's own, as declared" if entry["own_data"] else "Poisson batches"
    return (
        f"{origin}; in each step each of {entry['dataset_size']:,} examples was drawn independently "
        f"and {source} with probability {_about(entry['sampling_probability'])} (expected batch size "
        f"{entry['batch_size']:,}; {_about(entry['epochs'])} epochs)."
    )


def _truncated(entry):
    return (
        f"{_poisson(entry)} Draws of more than {entry['max_batch_size']:,} examples were cut to that size "
        "(truncated Poisson batches); the figures include what this costs."
    )


def _shuffled(entry):
    what = "batches in the data's own order," if entry["ordered"] else "shuffled batches"
    return (
        f"{what} of {entry['batch_size']:,} out of {entry['dataset_size']:,} examples "
        f"({_about(entry['epochs'])} epochs), which are not Poisson batches. {_passes(entry)}"
    )


def _own_data(entry):
    return (
        f"batches of {entry['batch_size']:,} from a data set of the user's own, declared to have "
        f"{entry['dataset_size']:,} examples ({_about(entry['epochs'])} epochs). {_passes(entry)}"
    )


def _passes(entry):
    return (
        f"The proved figure counts one use of each example in each of {entry['passes']:,} passes that were "
        "started, and takes no credit for the random order."
    )


def _unknown(entry):
    size = f" (batches of {entry['batch_size']:,})" if entry["batch_size"] else ""
    return f"unknown{size}. Each step is counted as if every example had been in its batch."


def _figures(facts):
    if not facts["entries"]:
        return []
    lines = [_proved(facts), _assumed(facts), _opt_in(facts), _delta(facts), _weak(facts)]
    return [line for line in lines if line]


def _proved(facts):
    return (
        f"{_mark(facts)}: epsilon = {round_up(facts['epsilon'])} at delta = {facts['delta']!r}, by "
        f"{facts['accountant'].upper()} accounting ({facts['accountant_library']} "
        f"{facts['accountant_version']}). Figures are rounded up."
    )


def _mark(facts):
    if math.isinf(facts["epsilon"]):
        return "Nothing is proved"
    if not facts["guarantee"]:
        return "Would be proved without the seed"
    several = "s" if len(facts["assumptions"]) > 1 else ""
    return f"Proved under the assumption{several} below" if facts["assumptions"] else "Proved"


def _assumed(facts):
    if facts["epsilon_assumed"] is None:
        return ""
    return (
        f"Assumed, NOT proved: epsilon = {round_up(facts['epsilon_assumed'])} at delta = {facts['delta']!r}. "
        "It would hold if the batches had been Poisson samples, which they were not. It is the figure that "
        "is often reported for shuffled batches; do not rely on it as a guarantee."
    )


def _opt_in(facts):
    if not facts["assume_poisson"]:
        return ""
    return (
        "By explicit choice (`assume_poisson`) the run's own displays and budgets used the assumed figure "
        "for shuffled batches."
    )


def _delta(facts):
    source = ""
    if facts["delta_is_default"]:
        source = (
            f"delta was not chosen by hand: it is the largest power of ten not above one over the number of "
            f"examples ({facts['dataset_size']:,})."
        )
    if facts["delta_is_large"]:
        source = (
            f"CAUTION: delta is above one over the number of examples ({facts['dataset_size']:,}). Such a "
            "delta allows a mechanism that publishes an example outright."
        )
    return source


def _weak(facts):
    if not 10 < facts["epsilon"] < math.inf:
        return ""
    return "CAUTION: an epsilon above ten is commonly held to be little or no protection on its own."


def _assumptions(facts):
    return [_ASSUMPTIONS[assumption] for assumption in facts["assumptions"]]


def _about(value):
    return f"about {value:.4g}"


def _factor(value):
    return "an unbounded number of" if math.isinf(value) else f"about {digits_up(value)}"


def digits_up(value: float) -> str:
    """A finite number in four digits, rounded up.

    Example:
    >>> digits_up(3.9433), digits_up(1e40 / 3)
    ('3.944', '3.334e+39')
    """
    return f"{decimal.Context(prec=4, rounding=decimal.ROUND_UP).create_decimal_from_float(value):g}"
