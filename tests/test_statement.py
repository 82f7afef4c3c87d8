"""The statement's words and its data are the same facts, and nothing that is not covered is passed over."""

import dataclasses
import json
import math
import re

import pytest

from dp2_keras.entries import Entry, Mechanism, PoissonSampling, ShuffledSampling, UnknownSampling
from dp2_keras.ledger import Ledger
from dp2_keras.statement import NOT_COVERED, Statement, statement
from dp2_keras.statement_text import digits_up, round_up

DP2 = Mechanism("DP2RMSprop", noise_multipliers=(1.0,), l2_norm_clips=(5.0, 0.5))
POISSON = PoissonSampling(dataset_size=25_000, batch_size=64)
SHUFFLED = ShuffledSampling(dataset_size=25_000, batch_size=64)
DECLARED = PoissonSampling(dataset_size=25_000, batch_size=64, own_data=True)


def changed(record, **changes):
    return dataclasses.replace(record, **changes)


def ledger(*runs):
    return Ledger(Entry.of_run(*run) for run in runs)


LEDGERS = {
    "poisson": ledger((DP2, POISSON, 39_000)),
    "truncated": ledger((DP2, changed(POISSON, max_batch_size=128), 390)),
    "shuffled": ledger((DP2, SHUFFLED, 39_100)),
    "own data": ledger((DP2, changed(SHUFFLED, own_data=True), 391)),
    "declared": ledger((DP2, DECLARED, 39_000)),
    "opt-in": ledger((DP2, changed(SHUFFLED, assume_poisson=True), 39_100)),
    "unknown": ledger((DP2, UnknownSampling(batch_size=32), 3)),
    "two releases": ledger((changed(DP2, noise_multipliers=(2.0, 3.5)), POISSON, 7)),
    "noise seed": ledger((changed(DP2, seeded=True), POISSON, 7)),
    "sampling seed": ledger((DP2, changed(POISSON, seeded=True), 7)),
    "one seed of many": ledger((DP2, POISSON, 7), (changed(DP2, seeded=True), SHUFFLED, 1)),
    "no noise": ledger((changed(DP2, noise_multipliers=(0.0,), l2_norm_clips=(math.inf,)), POISSON, 7)),
    "public data": ledger((changed(DP2, public_data=True), DECLARED, 39_000)),
    "mixed": ledger((DP2, POISSON, 390), (DP2, SHUFFLED, 391), (DP2, UnknownSampling(), 2)),
    "nothing": Ledger(),
}
NO_GUARANTEE = {"noise seed", "sampling seed", "one seed of many", "no noise", "nothing"}
each_ledger = pytest.mark.parametrize("name", LEDGERS)


def stated(name, delta=1e-5, **arguments):
    return statement(LEDGERS[name], delta, **arguments)


def words(one):
    """The text on one line, without the marks of its lists."""
    return " ".join(str(one).replace("\n  - ", "\n").split())


# The text and the data agree.


def infinities(value):
    """What a reader of the JSON document makes of it."""
    if isinstance(value, dict):
        return {key: infinities(item) for key, item in value.items()}
    if isinstance(value, list):
        return [infinities(item) for item in value]
    return math.inf if value == "Infinity" else value


@each_ledger
def test_json_holds_the_same_facts(name):
    one = stated(name)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert infinities(json.loads(one.to_json(), parse_constant=refuse)) == one.to_dict()


@each_ledger
def test_text_is_a_function_of_the_facts_alone(name):
    one = stated(name)
    assert str(Statement(infinities(json.loads(one.to_json())))) == str(one)


def printed(value):
    """All ways in which the text may print a number of the facts."""
    if isinstance(value, dict):
        return {text for item in value.values() for text in printed(item)}
    if isinstance(value, list):
        return {str(len(value))} | {text for item in value for text in printed(item)}
    if isinstance(value, str):
        return set(re.findall(r"\b\d[\d.]*\d|\b\d", value))
    if value is None or isinstance(value, bool):
        return set()
    finite = {digits_up(value)} if math.isfinite(value) else set()
    return {round_up(value), repr(value), f"{value:.4g}", f"{value:,}"} | finite


@each_ledger
@pytest.mark.parametrize("delta", [1e-5, 0.02])
def test_every_number_in_the_text_is_one_of_the_facts(name, delta):
    one = stated(name, delta, notes=["Trained for 12 days."])
    numbers = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)*(?:e[+-]?\d+)?", words(one))
    assert set(number.rstrip(",") for number in numbers) <= printed(one.to_dict())


@each_ledger
def test_figures_are_those_of_the_ledger(name):
    facts = stated(name).to_dict()
    if name == "opt-in":  # The ledger's own price is the assumed one.
        assert facts["epsilon_assumed"] == LEDGERS[name].epsilon(1e-5)
        assert facts["epsilon"] == LEDGERS["shuffled"].epsilon(1e-5)
    else:
        assert facts["epsilon"] == LEDGERS[name].epsilon(1e-5)
    assert facts["steps"] == LEDGERS[name].steps
    assert [entry["steps"] for entry in facts["entries"]] == [e.steps for e in LEDGERS[name].entries]


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("neighbors", ["add_remove", "replace_one"])
def test_accountant_and_relation_are_passed_on_and_named(accountant, neighbors):
    settings = dict(accountant=accountant, neighbors=neighbors)
    one = stated("two releases", **settings)
    assert one.to_dict()["epsilon"] == LEDGERS["two releases"].epsilon(1e-5, **settings)
    assert f"by {accountant.upper()} accounting (dp-accounting " in words(one)
    assert ("(replace-one)" in words(one)) == (neighbors == "replace_one")


def test_facts_cannot_be_changed_through_a_copy():
    one = stated("poisson")
    one.to_dict()["entries"][0]["steps"] = 1
    assert one.to_dict()["entries"][0]["steps"] == 39_000


# What the law turns on, word for word.


def test_the_guarantee_comes_first():
    assert words(stated("poisson")).startswith(
        "The training was differentially private: epsilon = 3.03051 at delta = 1e-05, for one example of the "
        "training data. In words:"
    )


@each_ledger
def test_no_guarantee_is_said_first_and_plainly(name):
    text, facts = str(stated(name)), stated(name).to_dict()
    assert text.startswith("NO GUARANTEE. ") == (name in NO_GUARANTEE)
    assert facts["guarantee"] == (name not in NO_GUARANTEE)
    assert bool(facts["no_guarantee_because"]) == (name in NO_GUARANTEE)
    if name in NO_GUARANTEE:
        assert "differentially private" not in text
        assert not facts["covered"] and "\nCovered:" not in text


GOLDEN = [
    (
        "poisson",
        "One example: one row of the training data. Not protected as a whole: a person who gave several",
    ),
    (
        "poisson",
        "Two data sets are neighbours if one is the other with one example added or removed. The "
        "number of examples is public: a missing example counts as a row that contributes nothing "
        "(zero-out).",
    ),
    (
        "poisson",
        "39,000 steps of DP2RMSprop. Mechanism: the contribution of each single example (no "
        "microbatches) was clipped to an L2 norm of at most 5.0 or 0.5, depending on the phase, and "
        "each step released a sum over the batch with Gaussian noise (noise multiplier 1.0:",
    ),
    (
        "poisson",
        "in each step each of 25,000 examples was drawn independently and in secret with probability "
        "about 0.00256 (expected batch size 64; about 99.84 epochs).",
    ),
    ("poisson", "Proved: epsilon = 3.03051 at delta = 1e-05, by RDP accounting"),
    (
        "poisson",
        "The final weights, and all intermediate weights (checkpoints) of the counted steps, if they "
        "are released.",
    ),
    ("poisson", "at most about 20.71 times (e^epsilon) the chance without it, plus delta"),
    ("poisson", "without one no guarantee for persons is possible"),
    ("truncated", "Draws of more than 128 examples were cut to that size (truncated Poisson batches)"),
    (
        "shuffled",
        "shuffled batches of 64 out of 25,000 examples (about 100.1 epochs), which are not Poisson",
    ),
    (
        "shuffled",
        "The proved figure counts one use of each example in each of 100 passes that were started, "
        "and takes no credit for the random order.",
    ),
    ("shuffled", "Assumed, NOT proved: epsilon = 3.03"),
    ("shuffled", "It would hold if the batches had been Poisson samples, which they were not."),
    ("shuffled", "an epsilon above ten is commonly held to be little or no protection"),
    ("own data", "for one example of the training data, if the assumption below holds."),
    ("own data", "Proved under the assumption below: epsilon ="),
    (
        "own data",
        "It is assumed, and was not checked, that no example occurs more than once in a pass",
    ),
    (
        "opt-in",
        "By explicit choice (`assume_poisson`) the run's own displays and budgets used the assumed",
    ),
    ("opt-in", "Proved: epsilon = 96.1"),
    (
        "unknown",
        "unknown (batches of 32). Each step is counted as if every example had been in its batch.",
    ),
    (
        "two releases",
        "each step released 2 sums of the same batch with Gaussian noise (noise multiplier 2.0 and 3.5",
    ),
    (
        "noise seed",
        "The noise came from a given seed: whoever knows or guesses the seed can take the noise away."
        " The figures below are what the run would have cost without the seed.",
    ),
    ("noise seed", "Would be proved without the seed: epsilon ="),
    ("sampling seed", "drawn independently and from a given seed with probability"),
    ("no noise", "At least one step added no noise: epsilon is infinite."),
    ("no noise", "Nothing is proved: epsilon = infinity at delta = 1e-05"),
    (
        "no noise",
        "was not clipped, and each step released a sum over the batch with NO noise (noise multiplier 0.0",
    ),
    ("nothing", "Nothing was trained: the ledger holds no step."),
]


@pytest.mark.parametrize("name, sentence", GOLDEN, ids=[f"{n}: {s[:30]}" for n, s in GOLDEN])
def test_golden_sentence(name, sentence):
    assert sentence in words(stated(name))


@pytest.mark.parametrize(
    "thing",
    [
        "Training metrics", "Keras prints, logs or returns", "early stopping", "Hyper-parameter search",
        "Repeated runs", "other branches", "Held-out data", "vocabularies", "idf weights", "`adapt()`",
        "lost in a crash, unless the run kept a `ledger_file`", "Floating point", "pseudo-random",
        "a person who gave several rows", "declared public", "not signed",
    ],
)  # fmt: skip
def test_what_is_not_covered_is_named(thing):
    assert thing in words(stated("poisson"))


@each_ledger
def test_what_is_not_covered_is_in_the_data_sentence_by_sentence(name):
    facts = stated(name).to_dict()
    assert facts["not_covered"] == NOT_COVERED
    assert all(sentence in words(stated(name)) for sentence in facts["not_covered"].values())


# The assumed figure.


@each_ledger
def test_assumed_figure_stands_beside_the_proved_one_only_where_they_differ(name):
    facts = stated(name).to_dict()
    differs = name in {"shuffled", "own data", "opt-in", "one seed of many", "mixed"}
    assert (facts["epsilon_assumed"] is not None) == differs
    assert ("Assumed, NOT proved" in words(stated(name))) == differs
    if differs:
        assert facts["epsilon_assumed"] < facts["epsilon"]


def test_opt_in_leaves_the_proved_figure_as_it_was():
    asked, plain = stated("opt-in").to_dict(), stated("shuffled").to_dict()
    assert asked["assume_poisson"] and not plain["assume_poisson"]
    for figure in ("epsilon", "epsilon_assumed"):
        assert asked[figure] == plain[figure]


def test_opt_in_keeps_the_passes_of_several_fits():
    short_fits = Ledger([Entry(DP2, changed(SHUFFLED, assume_poisson=True), steps=10, passes=10)])
    assert statement(short_fits).to_dict()["epsilon"] == ledger((DP2, UnknownSampling(), 10)).epsilon(1e-5)


# Delta.


def test_delta_defaults_to_the_rule_and_says_so():
    one = stated("poisson", None)
    assert one.to_dict()["delta"] == 1e-5 and one.to_dict()["delta_is_default"]
    assert "the largest power of ten not above one over the number of examples (25,000)" in words(one)
    assert "largest power of ten" not in words(stated("poisson"))


@pytest.mark.parametrize("delta, large", [(1 / 25_000, False), (1e-4, True), (0.5, True)])
def test_delta_above_one_over_n_is_cautioned(delta, large):
    one = stated("poisson", delta)
    assert one.to_dict()["delta_is_large"] == large
    assert ("CAUTION: delta is above one over the number of examples (25,000)." in words(one)) == large


def test_without_a_known_size_delta_must_be_given():
    with pytest.raises(ValueError, match="`delta` must be given"):
        stated("unknown", None)
    assert stated("nothing", None).to_dict()["delta"] is None


# What TF Privacy's statement says, ours says too.


def test_has_the_facts_of_tf_privacys_statement():
    library = pytest.importorskip("tensorflow_privacy")
    theirs = library.compute_dp_sgd_privacy_statement(
        number_of_examples=25_000, batch_size=64, num_epochs=39_000 * 64 / 25_000, noise_multiplier=1.0,
        delta=1e-5, used_microbatching=False,
    )  # fmt: skip
    facts = stated("poisson").to_dict()
    (entry,) = facts["entries"]
    poisson = float(re.search(r"assuming Poisson sampling \(\*\): +([\d.]+)", theirs)[1])
    assert facts["epsilon"] == pytest.approx(poisson, abs=5.1e-4)
    assert f"over {entry['dataset_size']} examples with {entry['batch_size']} examples" in " ".join(
        theirs.split()
    )
    assert f"noise multiplier {entry['noise_multipliers'][0]} for {entry['epochs']} epochs" in " ".join(
        theirs.split()
    )
    assert "without microbatching" in " ".join(theirs.split()) and not facts["microbatches"]
    assert "no bound on number of examples per user" in " ".join(theirs.split())
    assert facts["max_examples_per_user"] is None


# Edges.


@pytest.mark.parametrize("value", [0.0, 1e-12, 0.1, 3.0305, 3.03050001, 96.1163, 1e300])
def test_printed_epsilon_is_never_below_the_true_one(value):
    assert value <= float(round_up(value)) <= value + 1.0001e-5


def test_huge_epsilon_has_words():
    one = statement(ledger((changed(DP2, noise_multipliers=(1e-3,)), UnknownSampling(), 1)), 1e-5)
    assert "an unbounded number of times (e^epsilon)" in words(one)


def test_notes_are_repeated():
    notes = ["EarlyStopping looked at `loss`.", "The data was declared Poisson."]
    one = stated("poisson", notes=notes)
    assert one.to_dict()["notes"] == notes
    assert words(one).endswith("Notes: " + " ".join(notes))
    assert stated("poisson", notes=notes[0]).to_dict()["notes"] == notes[:1]
    assert "Notes:" not in words(stated("poisson"))


def test_names_cannot_break_out_of_the_text():
    one = statement(ledger((changed(DP2, optimizer="A\x1b[2J\n\nPROVED"), POISSON, 7)), notes=["a\nb"])
    assert "7 steps of A?[2J??PROVED." in words(one)
    assert all(c == "\n" or c.isprintable() for c in str(one))


@each_ledger
def test_text_is_plain_and_fits_a_page(name):
    assert str(stated(name)).isascii()
    assert max(map(len, str(stated(name)).splitlines())) <= 88


@pytest.mark.parametrize("name", ["poisson", "nothing"])
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(delta=0), "`delta` must be .* Received: delta=0"),
        (dict(delta=1.0), "`delta` must be .* Received: delta=1.0"),
        (dict(delta=math.nan), "`delta` must be .* Received: delta=nan"),
        (dict(accountant="gdp"), "`accountant` must be .*'rdp'.* Received: accountant='gdp'"),
        (dict(neighbors="user"), "`neighbors` must be .*'replace_one'.* Received: neighbors='user'"),
        (dict(notes=[3]), r"`notes` must be sentences. Received: notes=\[3\]"),
    ],
)
def test_rejects(name, change, message):
    with pytest.raises(ValueError, match=message):
        statement(LEDGERS[name], **change)


def test_batches_in_order_are_not_called_shuffled_and_have_no_assumed_figure():
    one = statement(ledger((DP2, changed(SHUFFLED, ordered=True), 391)), 1e-5)
    assert "batches in the data's own order" in words(one) and "shuffled batches" not in words(one)
    assert one.to_dict()["epsilon_assumed"] is None


@each_ledger
def test_the_factor_is_rounded_up(name):
    printed = re.search(r"at most about (\S+) times", words(stated(name)))
    factor = stated(name).to_dict()["factor"]
    assert printed is None or factor <= float(printed[1]) <= 1.001 * factor


def test_declared_poisson_batches_are_named_as_a_declaration():
    assert stated("declared").to_dict()["assumptions"] == ["declared_poisson"]
    text = words(stated("declared"))
    assert "Poisson batches of the user's own, as declared" in text and "That was not checked" in text
    assert "as declared" not in words(stated("poisson"))


def test_public_data_is_named_as_an_assumption():
    assert stated("public data").to_dict()["assumptions"] == ["declared_poisson", "public_data"]
    text = words(stated("public data"))
    assert "if the assumptions below hold." in text and "Proved under the assumptions below" in text
    assert "it holds nothing of the protected examples" in text
    assert "public data" not in words(stated("poisson"))
