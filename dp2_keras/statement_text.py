"""The words of a privacy statement: a text made of its facts alone.

    words = a section for each question that a reader has, in lines of at most 88 characters

Epsilon is rounded up, never down. A word that is longer is not broken.
"""

from __future__ import annotations

import decimal
import math
import textwrap

WIDTH = 88

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


def words(facts: dict) -> str:
    """The facts of a `Statement` as a text.

    Args:
        facts: as `Statement.to_dict` gives them.
    """
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
    phrases = {
        "poisson": _poisson,
        "truncated_poisson": _truncated,
        "shuffled": _shuffled,
        "own_data": _own_data,
        "unknown": _unknown,
    }
    return f"Sampling: {phrases[entry['sampling']](entry)}"


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


def digits_up(value: float) -> str:
    """A finite number in four digits, rounded up.

    Example:
    >>> digits_up(3.9433), digits_up(1e40 / 3)
    ('3.944', '3.334e+39')
    """
    return f"{decimal.Context(prec=4, rounding=decimal.ROUND_UP).create_decimal_from_float(value):g}"
