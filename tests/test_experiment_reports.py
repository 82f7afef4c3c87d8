"""Configurations as printed, and what reports and progress say."""

import math

import pytest
from experiment_cases import report_of, result

from dp2_keras.experiments import configuration as configurations
from dp2_keras.experiments import methods, report, summary, tasks
from dp2_keras.experiments.progress import Progress, duration

TABLES = ["ablations", "main", "practical", "practical-public", "recipe", "small-batches"]


# Configurations.


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", configurations.names())
def test_a_configuration_is_valid_and_names_what_there_is(name, quick):
    found = configurations.load(name, quick)
    assert found.cases and (found.plot or found.kind == "table")
    for case in found.cases:
        assert case.task in tasks.TASKS and case.method in methods.METHODS
        assert quick == (case.task == "synthetic")
        assert case.hyper is not None or not quick
        assert (case.noise_multiplier is None) == (case.match is not None)


def test_every_table_and_figure_of_the_paper_is_there():
    figures = "compute convergence curves delay nonprivate preconditioner public staleness tradeoff".split()
    assert configurations.names("figure") == figures and configurations.names("table") == TABLES


def test_the_papers_figures_are_as_printed():
    cases = {(case.task, case.method): case for case in configurations.load("main").cases}
    best = cases["imdb", "DP2RMSprop"]
    assert best.paper == [0.815, 0.011] and best.source == "paper"
    assert best.hyper == dict(
        sgd_learning_rate=0.1, learning_rate=3, sgd_l2_norm_clip=0.5, l2_norm_clip=5, eps=1e-7, delay=195
    )
    assert cases["movielens", "DPSGD"].hyper == {"learning_rate": 0.1, "l2_norm_clip": 1}
    assert cases["imdb", "DPAdam"].hyper is None


def test_one_name_varies_at_a_time():
    cases = configurations.load("recipe", quick=True).cases
    assert [case.varied for case in cases] == [{"weight_noise": 0.5}, {"shrinkage": 0.0}]
    assert all(case.varied == {} for case in configurations.load("main").cases)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"plot": "pie"}, "`plot` must be one of"),
        ({"kind": "poem"}, "`kind` must be one of"),
        ({"seeds": 0}, "`seeds` must be a positive integer"),
        ({"colour": "red"}, "must have keys of"),
    ],
)
def test_a_wrong_configuration_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        configurations.parse("main", {**configurations.document("main"), **change})


# Words.


def test_progress_tells_the_time_that_is_left(capsys):
    now = [0.0]
    progress = Progress(4, work=40.0, clock=lambda: now[0])
    now[0] = 10.0
    progress.add(10.0)
    progress.add(10.0, failed=True)
    assert progress.line() == "[############------------] 2/4 runs, 1 failed, 10 s left"
    assert duration(3599) == "59 min 59 s"


def test_mean_and_deviation():
    assert summary.spread([2.0]) == {"mean": 2.0, "deviation": None}
    assert math.isnan(summary.spread([1.0, "nan"])["mean"])


def rendered(*results):
    return report.render(report_of(*results))


def test_the_report_has_the_numbers_beside_the_papers():
    text = rendered(result(search={"runs": 60, "failed": 2, "edges": ["learning_rate"]}))
    line = next(line for line in text.splitlines() if line.startswith("| DPSGD"))
    for words in ("3.0305", "0.900 ± 0.010", "0.856 ± 0.002", "0.687 ± 0.018", "39,000", "learning_rate 5"):
        assert words in line
    assert "60, 2 without a result; **edge**: learning_rate" in line
    for words in ("*majority class*", "does not cover a search", "at most 60 runs", "seeds: 5.", "keras 3"):
        assert words in " ".join(text.split())


def test_the_report_says_how_many_seeds_each_setting_has():
    assert "seeds: 3 or 5." in rendered(result(), result(seeds=3), result(seeds=0))
    assert "seeds: none." in rendered(result(seeds=0))


def test_the_report_names_all_versions_that_ran():
    text = rendered(
        result(),
        result(versions=[{"keras": "4"}, {"keras": "5", "numpy": "2"}]),
        result(seeds=0, versions=[]),
    )
    assert "Versions: keras 3 or 4 or 5, numpy 2." in text


METHODS = {"other": ("DPSGD",), "IMDB": ("DPSGD", "DPAdam", "DP2RMSprop")}


def joined(new, earlier):
    return summary.joined(*report_of(*new), *report_of(*earlier), METHODS)["settings"][0]["results"]


def test_a_table_keeps_what_a_call_is_not_about():
    delays = [result(method="DP2RMSprop", varied={"delay": s}) for s in (5, 20)]
    noises = [result(method="DPAdam", noise_multiplier=sigma) for sigma in (1.0, 2.0)]
    new = [result(method="DPAdam", seeds=3), result(method="DP2RMSprop", varied={"delay": 5}, seeds=3)]
    found = [
        (r["method"], r["noise_multiplier"], r["varied"], r["seeds"]) for r in joined(new, delays + noises)
    ]
    assert found == [
        ("DPAdam", 1.0, {}, 3),
        ("DPAdam", 2.0, {}, 5),
        ("DP2RMSprop", 1.0, {"delay": 5}, 3),
        ("DP2RMSprop", 1.0, {"delay": 20}, 5),
    ]


def test_a_table_keeps_its_other_settings_in_the_order_of_the_configuration():
    (earlier,), (new,) = report_of(result()), report_of(result(method="DPAdam"))
    other = {**earlier["settings"][0], "label": "other"}
    found = summary.joined(new, {**earlier, "settings": [*earlier["settings"], other]}, METHODS)
    assert found["settings"] == [other, *report_of(result(), result(method="DPAdam"))[0]["settings"]]
    assert summary.joined(new, None, METHODS) == new


def test_a_call_without_a_search_does_not_undo_one():
    searched, without = result(search={"runs": 60}), result(hyper=None, seeds=0)
    assert joined([without], [searched]) == [searched] and joined([searched], [without]) == [searched]
    assert joined([without], []) == [without]


@pytest.mark.parametrize("change", [{"epochs": 1}, {"batch_size": 1}, {"label": "Synthetic reviews"}])
def test_a_table_does_not_mix_what_was_run_otherwise(change):
    (earlier,), (new,) = report_of(result()), report_of(result(method="DPAdam"))
    earlier["settings"][0].update(change)
    assert summary.joined(new, earlier, METHODS) == new


def test_a_table_forgets_a_method_that_is_no_part_of_it():
    assert joined([result()], [result(method="DPYogi")]) == [result()]


def test_the_report_says_what_is_missing():
    missing = result(method="DPAdam", seeds=0, hyper=None, paper=None)
    failed = result(method="DPAdagrad", seeds=0, errors=["ValueError: no\nway"])
    text = rendered(missing, failed, result(method="RMSprop", epsilon="inf"))
    assert "no hyper-parameters: search" in text and "all failed" in text and "∞" in text
    assert "DPAdagrad failed: ValueError: no way" in text


def test_the_report_says_when_a_method_was_as_good_as_dp_sgd_in_the_end():
    def curve(*values):
        return [{"step": 10 * (k + 1), "test": {"mean": value}} for k, value in enumerate(values)]

    slow = result(steps=50, curve=curve(0.5, 0.6, 0.7, 0.75, 0.8), test={"mean": 0.8, "deviation": None})
    fast = result(method="DP2RMSprop", curve=curve(0.7, 0.85, 0.9, 0.9, 0.9))
    bad = result(method="DPAdam", curve=curve(0.7, 0.7, 0.7, 0.7, 0.7))
    text = rendered(slow, fast, bad)
    assert "reached after 20, 2.5x" in text and "never as good as DP-SGD's end" in text


def test_a_speed_up_is_counted_from_when_dp_sgd_itself_was_as_good():
    values = [0.5, 0.8, 0.85, 0.9, 0.8]
    curve = [{"step": 10 * (k + 1), "test": {"mean": value}} for k, value in enumerate(values)]
    early = result(steps=50, curve=curve, test={"mean": 0.8, "deviation": None})
    text = rendered(early, result(method="DP2RMSprop", curve=curve[1:]))
    assert text.count("reached after 20, 1.0x") == 2
    assert "reached" not in rendered(result(curve=curve, test={"mean": math.nan, "deviation": None}))
