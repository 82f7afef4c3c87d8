"""Configurations as printed, and what reports, figures and progress say."""

import math

import pytest

from dp2_keras.experiments import configuration as configurations
from dp2_keras.experiments import methods, report, summary, tasks
from dp2_keras.experiments.progress import Progress, duration

TABLES = ["ablations", "main", "practical", "recipe", "small-batches"]


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


def result(**changes):
    fields = dict(method="DPSGD", varied={}, noise_multiplier=1.0, hyper={"learning_rate": 5}, source="paper")
    fields.update(search=None, paper=[0.687, 0.018], seeds=5, errors=[], epsilon=3.03051, steps=39000)
    fields.update(train={"mean": 0.9, "deviation": 0.01}, test={"mean": 0.8564, "deviation": 0.002}, curve=[])
    fields.update(keys=["a", "b"], versions=[{"keras": "3"}])
    return {**fields, **changes}


def report_of(*results):
    setting = dict(
        task="imdb", label="IMDB", task_title="IMDB", metric="accuracy", higher_is_better=True, epochs=100
    )
    setting.update(batch_size=64, train_size=25000, test_size=25000, delta=1e-5)
    setting.update(trivial={"majority class": {"train": 0.5, "test": 0.5}}, results=list(results))
    return [dict(name="main", title="Main", source="Table 2", plot=None, settings=[setting])]


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


SPREAD = {"mean": 0.8, "deviation": 0.01}
CURVE = [dict(epoch=k, step=k, **dict.fromkeys(("train", "test", "train_loss"), SPREAD)) for k in (1, 2)]
COUNTS = [0] * 30 + [5, 10, 5] + [0] * 87


@pytest.mark.parametrize("plot", configurations.PLOTS)
def test_every_figure_can_be_drawn(plot, tmp_path):
    from dp2_keras.experiments import plots

    seen = {"second_moments": [{"step": 1, "counts": COUNTS}]}
    shared = dict(curve=CURVE, probes=[seen], staleness=2.0)
    varied = [result(method="DP2RMSprop", varied={"delay": s}, **shared) for s in (5, 20)]
    across = (
        [] if plot == "staleness" else [result(**shared), result(method="RMSprop", epsilon="inf", **shared)]
    )
    failed = result(method="DPAdam", seeds=0, errors=["no"])
    summaries = *report_of(*varied, *across, failed), *report_of(failed)
    settings = [setting for one in summaries for setting in one["settings"]]
    plots.draw({**summaries[0], "plot": plot, "settings": settings}, str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def panels(plot, *labels, **changes):
    """The axes of settings of one task, one result each."""
    from dp2_keras.experiments import plots

    summary = report_of(result(curve=CURVE))[0]
    settings = [{**summary["settings"][0], "label": label, **changes} for label in labels]
    grouped = plots._grouped({**summary, "plot": plot, "settings": settings})
    figure, all_axes = plots._panels(len(grouped))
    for axes, panel in zip(all_axes, grouped):
        plots.PLOTS[plot](axes, {**panel, "colours": plots._colours({"settings": settings})})
        axes.set_title(plots._title(panel, plot))
    return all_axes


def test_settings_of_one_task_and_size_share_a_panel_and_differ_in_style():
    (axes,) = panels("curves", "IMDB, batch 64", "IMDB, batch 64, other clip")
    test_lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    assert [line.get_label() for line in test_lines] == ["DPSGD", "DPSGD, other clip"]
    assert [line.get_linestyle() for line in test_lines] == ["-", "--"]
    assert {line.get_color() for line in test_lines} == {"C0"}
    assert "epsilon = 3.03, delta = 1e-05\nmajority class: 0.500" in axes.get_title()


def test_what_is_varied_has_its_own_colour_in_curves():
    varied = [result(curve=CURVE, varied={"delay": s}) for s in (5, 20)]
    (axes,) = panels("curves", "IMDB", results=varied)
    test_lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    assert [line.get_label() for line in test_lines] == ["DPSGD, s = 5", "DPSGD, s = 20"]
    assert [line.get_color() for line in test_lines] == ["C0", "C1"]


def test_a_figure_without_privacy_has_neither_epsilon_nor_delta():
    (axes,) = panels("losses", "IMDB", results=[result(curve=CURVE, epsilon="inf")])
    assert axes.get_title() == "IMDB\nn = 25,000, batch 64, 100 epochs"
    assert axes.get_ylabel() == "training loss (nats per example)"


def test_a_caption_says_what_was_not_tuned():
    from dp2_keras.experiments import plots

    tuned = result(search={"runs": 60, "failed": 0, "edges": []})
    summary = report_of(tuned, result(method="DP2NoiseFloorRecipe", search=None))[0]
    assert plots._caption(summary).endswith(
        "at most 60 runs on train (seed 1000), but DP2NoiseFloor (recipe) as stated"
    )
    assert plots._caption(report_of(result())[0]) == "mean ± deviation of 5 seeds; stated hyper-parameters"
    assert "but" not in plots._caption(report_of(tuned)[0])


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
    curve = [{"step": 10 * k, "test": {"mean": value}} for k, value in enumerate([0.5, 0.7, 0.8, 0.9, 0.8])]
    early = result(steps=40, curve=curve, test={"mean": 0.8, "deviation": None})
    text = rendered(early, result(method="DP2RMSprop", curve=curve[1:]))
    assert text.count("reached after 20, 1.0x") == 2
