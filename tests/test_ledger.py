"""A ledger's price is that of the steps that ran, however they came to be counted."""

import functools
import json
import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp2_keras import accounting
from dp2_keras.entries import Entry, Mechanism, PoissonSampling, ShuffledSampling, UnknownSampling
from dp2_keras.ledger import Ledger

DP2 = Mechanism("DP2RMSprop", noise_multipliers=(1.0,), l2_norm_clips=(5.0, 0.5))
TWICE = Mechanism("DP2RMSprop", noise_multipliers=(3.0, 4.0), l2_norm_clips=(1.0,))
IMDB = PoissonSampling(dataset_size=25_000, batch_size=64)
SHUFFLED = ShuffledSampling(dataset_size=100, batch_size=30)
TRUNCATED = PoissonSampling(dataset_size=1000, batch_size=10, max_batch_size=40)
MECHANISMS = [DP2, TWICE, Mechanism("DPSGD", (2.5,), (math.inf,), seeded=True)]
SAMPLINGS = [
    IMDB,
    PoissonSampling(dataset_size=1000, batch_size=10, max_batch_size=1000),
    PoissonSampling(dataset_size=50, batch_size=50, seeded=True),
    SHUFFLED,
    ShuffledSampling(dataset_size=100, batch_size=30, own_data=True),
    ShuffledSampling(dataset_size=100, batch_size=30, assume_poisson=True),
    UnknownSampling(),
    UnknownSampling(batch_size=7),
]
RUNS = st.tuples(st.sampled_from(MECHANISMS), st.sampled_from(SAMPLINGS), st.integers(1, 30))


def ledger_of(*runs):
    return Ledger(Entry.of_run(*run) for run in runs)


def participations(sampling, steps):
    """The oracle: walks through the steps, with the example where it is used most often."""
    whole, all_of_it = (
        sampling.dataset_size // sampling.batch_size,
        sampling.dataset_size / sampling.batch_size,
    )
    one_pass = not sampling.streamed and steps <= math.ceil(all_of_it)
    # A user's batches may drop a remainder, or hold the end of a pass and the start of the next.
    steps_per_pass = max(1, whole) if sampling.own_data and not one_pass else math.ceil(all_of_it)
    return sum(step % steps_per_pass == 0 for step in range(steps))


@functools.cache
def divergences(event):
    return dp_accounting.rdp.RdpAccountant().compose(event).rdp


def price_by_hand(runs, delta):
    """The oracle: the divergences of each run added up, none of it truncated."""
    total = 0.0
    for mechanism, sampling, steps in runs:
        sigma = sum(s**-2 for s in mechanism.noise_multipliers) ** -0.5
        event, count = dp_accounting.GaussianDpEvent(sigma), steps
        if isinstance(sampling, PoissonSampling) or getattr(sampling, "assume_poisson", False):
            event = dp_accounting.PoissonSampledDpEvent(sampling.batch_size / sampling.dataset_size, event)
        elif isinstance(sampling, ShuffledSampling):
            count = participations(sampling, steps)
        total = total + count * divergences(event)
    return dp_accounting.rdp.compute_epsilon(dp_accounting.rdp.RdpAccountant().orders, total, delta)[0]


# Counting.


def test_an_open_run_counts_at_once_and_is_kept_when_closed():
    ledger = Ledger()
    ledger.begin(DP2, IMDB)
    assert ledger.entries == () and ledger.steps == 0
    ledger.advance(3)
    assert ledger.entries == (Entry(DP2, IMDB, 3),)
    ledger.advance(5)
    ledger.close()
    ledger.close()
    assert ledger.entries == (Entry(DP2, IMDB, 5),)


def test_equal_runs_are_one_entry_in_the_order_of_first_appearance():
    ledger = ledger_of((TWICE, IMDB, 1), (DP2, IMDB, 2), (TWICE, IMDB, 4), (TWICE, SHUFFLED, 9))
    assert [(e.mechanism, e.sampling, e.steps) for e in ledger.entries] == [
        (TWICE, IMDB, 5),
        (DP2, IMDB, 2),
        (TWICE, SHUFFLED, 9),
    ]


def test_a_run_that_was_left_open_is_closed_by_the_next():
    ledger = Ledger()
    for _ in range(2):
        ledger.begin(DP2, IMDB)
        ledger.advance(3)
    assert ledger.steps == 6


def test_a_run_cannot_lose_steps_or_be_counted_without_being_opened():
    ledger = Ledger()
    with pytest.raises(ValueError, match="`advance` needs an open run"):
        ledger.advance(1)
    ledger.begin(DP2, IMDB)
    ledger.advance(3)
    with pytest.raises(ValueError, match="at least the 3 steps that the open run has had. Received: steps=2"):
        ledger.advance(2)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 200), st.booleans(), st.booleans())
def test_passes_are_the_most_uses_of_an_example(size, batch_size, steps, own_data, streamed):
    sampling = ShuffledSampling(size, batch_size, own_data=own_data, streamed=own_data and streamed)
    assert sampling.passes(steps) == participations(sampling, steps)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(RUNS, st.lists(st.integers(0, 30)), st.sampled_from("close save leave".split()))))
def test_any_history_costs_what_ran(history):
    """Runs that grow in parts, and are then closed, saved and loaded, or interrupted."""
    ledger, ran = Ledger(), []
    for (mechanism, sampling, steps), parts, end in history:
        ledger.begin(mechanism, sampling)
        for part in sorted(min(part, steps) for part in [*parts, steps]):
            ledger.advance(part)
        ran.append((mechanism, sampling, steps))
        if end == "close":
            ledger.close()
        elif end == "save":
            ledger = Ledger.from_json(ledger.to_json())
    assert ledger.steps == sum(steps for _, _, steps in ran)
    np.testing.assert_allclose(ledger.epsilon(1e-3), price_by_hand(ran, 1e-3) if ran else 0.0, rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(RUNS, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_runs_does_not_matter(runs, random):
    ledger, mixed = ledger_of(*runs), list(runs)
    random.shuffle(mixed)
    assert ledger_of(*mixed) == ledger
    half = len(mixed) // 2
    assert ledger_of(*mixed[:half]).merged(ledger_of(*mixed[half:])) == ledger
    np.testing.assert_allclose(ledger_of(*mixed).epsilon(1e-5), ledger.epsilon(1e-5), rtol=1e-10)


@given(st.lists(RUNS, max_size=5), st.lists(RUNS, max_size=5))
def test_what_is_beyond_another_ledger_makes_it_cover(ours, theirs):
    ours, theirs = ledger_of(*ours), ledger_of(*theirs)
    assert theirs.merged(ours.beyond(theirs)).covers(ours)
    assert ours.covers(theirs) == (not theirs.beyond(ours).entries)
    assert ours.merged(theirs).covers(ours) and not ours.beyond(ours).entries


def test_a_copy_is_its_own():
    ledger = ledger_of((DP2, IMDB, 3))
    copy = ledger.copy()
    copy.begin(DP2, IMDB)
    copy.advance(1)
    assert (ledger.steps, copy.steps) == (3, 4) and copy != ledger


# Prices.


def test_a_run_of_imdb():
    ledger = ledger_of((DP2, IMDB, 39_000))
    assert f"{ledger.epsilon():.4f}" == f"{ledger.epsilon(1e-5):.4f}" == "3.0305"


def test_shuffled_batches_have_a_proved_and_an_assumed_price():
    ledger = ledger_of((DP2, ShuffledSampling(25_000, 64), 39_100))
    assert f"{ledger.epsilon():.2f} {ledger.epsilon(assumed=True):.4f}" == "96.12 3.0348"


def test_a_release_on_batches_of_unknown_origin_is_not_amplified():
    assert ledger_of((TWICE, UnknownSampling(), 7)).epsilon(1e-5) == accounting.price(
        [(accounting.gaussian(3.0, 4.0), 7)], 1e-5
    )


def test_truncated_batches_cost_more_and_only_where_they_are_truncated():
    limited = PoissonSampling(25_000, 64, max_batch_size=128)
    plain, truncated = ledger_of((DP2, IMDB, 39_000)), ledger_of((DP2, limited, 39_000))
    assert plain.epsilon() < truncated.epsilon() < plain.epsilon() + 0.01
    both = ledger_of((DP2, IMDB, 19_000), (DP2, limited, 20_000))
    assert plain.epsilon() < both.epsilon() < truncated.epsilon()


def test_nothing_costs_nothing_and_no_noise_costs_infinity():
    assert Ledger().epsilon() == 0.0
    assert ledger_of((Mechanism("DPSGD", (0,), (1.0,)), IMDB, 1)).epsilon() == math.inf


def test_options_reach_the_accountant():
    entry = Entry.of_run(DP2, IMDB, 100)
    terms = dict(accountant="pld", neighbors="replace_one")
    assert Ledger([entry]).epsilon(1e-5, **terms) == accounting.price([entry.releases()], 1e-5, **terms)


def test_the_default_delta_is_that_of_the_largest_data_set():
    ledger = ledger_of((DP2, IMDB, 1), (DP2, PoissonSampling(1_000_000, 64), 1), (DP2, UnknownSampling(), 1))
    assert ledger.dataset_size == 1_000_000
    assert ledger.epsilon() == ledger.epsilon(1e-6) > ledger.epsilon(1e-5)


def test_delta_is_needed_if_no_size_is_known():
    ledger = ledger_of((DP2, UnknownSampling(), 1))
    assert ledger.dataset_size is None
    with pytest.raises(ValueError, match="`delta` must be given"):
        ledger.epsilon()


# Budgets.


def test_a_budget_of_three_pays_for_38285_steps_of_imdb_in_one_run_or_two():
    question = dict(mechanism=DP2, sampling=IMDB, epsilon=3.0, delta=1e-5, upper=39_000)
    assert Ledger().allowed_steps(**question) == 38_285
    assert ledger_of((DP2, IMDB, 30_000)).allowed_steps(**question) == 8_285
    assert ledger_of((DP2, IMDB, 38_285)).allowed_steps(**question) == 0
    assert ledger_of((DP2, IMDB, 39_000)).allowed_steps(**question) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(RUNS, max_size=3),
    st.sampled_from(MECHANISMS),
    st.sampled_from([*SAMPLINGS, TRUNCATED]),
    st.floats(0.1, 100.0),
    st.sampled_from(["add_remove", "replace_one"]),
)
def test_allowed_steps_are_the_edge(history, mechanism, sampling, limit, neighbors):
    ledger = ledger_of(*history)
    allowed = ledger.allowed_steps(mechanism, sampling, limit, 1e-5, neighbors=neighbors, upper=500)

    def cost(steps):
        new = ledger_of((mechanism, sampling, steps)) if steps else Ledger()
        return ledger.merged(new).epsilon(1e-5, neighbors=neighbors)

    assert allowed == 0 or cost(allowed) <= limit
    assert allowed == 500 or cost(allowed + 1) > limit


# Documents.


@given(st.lists(RUNS, max_size=6))
def test_json_round_trips(runs):
    ledger = ledger_of(*runs)
    again = Ledger.from_json(ledger.to_json())
    assert again == ledger and again.entries == ledger.entries
    json.loads(ledger.to_json(), parse_constant=pytest.fail)


def test_numpy_numbers_are_the_same_settings():
    mechanism = Mechanism("DP2RMSprop", (np.float64(1.0),), [np.float32(5.0), np.float64(0.5)])
    sampling = PoissonSampling(np.int64(25_000), np.int32(64))
    ledger = ledger_of((mechanism, sampling, np.int64(5)), (DP2, IMDB, 2))
    assert Ledger.from_json(ledger.to_json()).entries == (Entry(DP2, IMDB, 7),)


def changed(path, value):
    document = json.loads(ledger_of((DP2, IMDB, 5), (DP2, SHUFFLED, 9)).to_json())
    *parents, name = path
    target = document
    for parent in parents:
        target = target[parent]
    target[name] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    "document",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 1}',
        "[" * 100_000,
        changed(["version"], 2),
        changed(["comment"], "x"),
        changed(["entries"], {"a": 1}),
        changed(["entries"], None),
        changed(["entries", 0], []),
        changed(["entries", 0, "steps"], -5),
        changed(["entries", 0, "steps"], 0),
        changed(["entries", 0, "steps"], 5.0),
        changed(["entries", 0, "steps"], "5"),
        changed(["entries", 0, "steps"], True),
        changed(["entries", 0, "passes"], 3),
        changed(["entries", 0, "note"], 3),
        changed(["entries", 1, "passes"], None),
        changed(["entries", 1, "passes"], 2),  # 9 steps of 4 to a pass start 3 at least.
        changed(["entries", 1, "passes"], 10),
        changed(["entries", 0, "mechanism"], None),
        changed(["entries", 0, "mechanism", "noise_multipliers"], []),
        changed(["entries", 0, "mechanism", "noise_multipliers"], [math.nan]),
        changed(["entries", 0, "mechanism", "noise_multipliers"], [math.inf]),
        changed(["entries", 0, "mechanism", "noise_multipliers"], [-1.0]),
        changed(["entries", 0, "mechanism", "noise_multipliers"], "11"),
        changed(["entries", 0, "mechanism", "l2_norm_clips"], [0.0]),
        changed(["entries", 0, "mechanism", "optimizer"], 7),
        changed(["entries", 0, "mechanism", "seeded"], 1),
        changed(["entries", 0, "sampling", "kind"], "uniform"),
        changed(["entries", 0, "sampling", "kind"], []),
        changed(["entries", 0, "sampling", "kind"], "unknown"),
        changed(["entries", 0, "sampling", "batch_size"], 25_001),
        changed(["entries", 0, "sampling", "dataset_size"], math.nan),
        changed(["entries", 0, "sampling", "max_batch_size"], 0),
    ],
    ids=lambda document: document[:20],
)
def test_rejects_documents_that_it_did_not_write(document):
    with pytest.raises(ValueError, match="This is not a ledger that can be trusted"):
        Ledger.from_json(document)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Mechanism("", (1.0,), (1.0,)), "`optimizer` must be a text .* Received: optimizer=''"),
        (
            lambda: Mechanism("A", (), (1.0,)),
            r"`noise_multipliers` must be .* Received: noise_multipliers=\(\)",
        ),
        (lambda: PoissonSampling(10, 11), "at most `dataset_size`. Received: batch_size=11, dataset_size=10"),
        (lambda: PoissonSampling(10, 0), "`batch_size` must be a positive integer. Received: batch_size=0"),
        (lambda: Entry(DP2, IMDB, 10**400), "`steps` must be at most"),
        (lambda: UnknownSampling(batch_size=0), "`batch_size` must be a positive integer"),
        (lambda: Entry(DP2, IMDB, 0), "`steps` must be a positive integer. Received: steps=0"),
        (lambda: Entry(DP2, SHUFFLED, 9, 2), "`passes` and `steps` must be possible .* passes=2, steps=9"),
    ],
)
def test_rejects_impossible_entries(call, message):
    with pytest.raises(ValueError, match=message):
        call()
