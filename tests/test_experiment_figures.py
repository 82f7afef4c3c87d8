"""Figures: what stands in them, read off the axes."""

import math

import pytest
from experiment_cases import report_of, result

from dp2_keras.experiments import configuration as configurations
from dp2_keras.experiments import plots

SPREAD = {"mean": 0.8, "deviation": 0.01}
CURVE = [dict(epoch=k, step=k, **dict.fromkeys(("train", "test", "train_loss"), SPREAD)) for k in (1, 2)]
COUNTS = [0] * 30 + [5, 10, 5] + [0] * 87


def figure(plot, *settings):
    summary = report_of()[0]
    return plots.figure_of(
        {**summary, "plot": plot, "settings": [{**summary["settings"][0], **s} for s in settings]}
    )


def panels(plot, *settings):
    """The axes that show something."""
    return [axes for axes in figure(plot, *settings).axes if axes.axison]


def lines(axes):
    """Lines that are in the legend."""
    return [line for line in axes.get_lines() if not line.get_label().startswith("_")]


def of_delays(**changes):
    seen = {"second_moments": [{"step": 1, "counts": COUNTS}]}
    shared = dict(curve=CURVE, probes=[seen], staleness=2.0)
    return [result(**{"varied": {"delay": s}, **shared, **changes}) for s in (5, 20)]


@pytest.mark.parametrize("plot", configurations.PLOTS)
def test_every_figure_can_be_drawn(plot, tmp_path):
    across = [result(curve=CURVE), result(method="RMSprop", epsilon="inf", curve=CURVE)]
    failed = result(method="DPAdam", seeds=0, errors=["no"])
    results = [*of_delays(), *([] if plot in ("staleness", "second_moments") else across), failed]
    summary = report_of(*results)[0]
    empty = {**summary["settings"][0], "task": "movielens", "results": [failed]}
    plots.draw({**summary, "plot": plot, "settings": [*summary["settings"], empty]}, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("plot", ["curves", "tradeoff", "delay"])
def test_results_that_are_not_finite_do_not_stop_a_figure(plot):
    nothing = {"mean": math.nan, "deviation": math.nan}
    curve = [{**point, "train": nothing, "test": nothing} for point in CURVE]
    (axes,) = panels(plot, {"results": of_delays(curve=curve, test=nothing)})
    assert all(map(math.isfinite, axes.get_ylim()))


def test_settings_of_one_task_and_size_share_a_panel_and_differ_in_style():
    own = [result(curve=CURVE)]
    settings = [
        {"label": label, "results": own} for label in ("IMDB, batch 64", "IMDB, batch 64, other clip")
    ]
    (axes,) = panels("curves", *settings)
    assert [line.get_label() for line in lines(axes)] == ["DPSGD", "DPSGD, other clip"]
    assert [line.get_linestyle() for line in axes.get_lines()][::2] == ["-", "--"]
    assert {line.get_color() for line in lines(axes)} == {"C0"}
    heading = "IMDB, batch 64\nn = 25,000, batch 64, 100 epochs, epsilon = 3.03, delta = 1e-05"
    assert axes.get_title() == f"{heading}\nmajority class: 0.500"
    assert len(panels("curves", settings[0], {**settings[1], "epochs": 7})) == 2


@pytest.mark.parametrize("length", [6, plots._LONG_NAME, plots._LONG_NAME + 1, 60])
def test_a_legend_is_no_wider_than_its_panel(length):
    name = ("DPAdagradPublicSubspace, two releases a step, " * 2)[: length - 1]
    results = [result(method=f"{name}{number}", curve=CURVE) for number in range(5)]
    drawn = figure("curves", {"results": results})
    drawn.draw_without_rendering()
    (axes,) = (axes for axes in drawn.axes if axes.axison)
    assert axes.get_legend().get_window_extent().width < plots._PANEL[0] * drawn.dpi


def test_a_trade_off_has_all_sizes_of_a_task_in_one_panel():
    settings = [
        {"label": label, "epochs": epochs, "results": [result(epsilon=e) for e in (3.0, 1.0)]}
        for label, epochs in (("IMDB, 1x", 100), ("IMDB, 4x", 400))
    ]
    plain = {"label": "IMDB, not private", "results": [result(method="RMSprop", epsilon="inf")]}
    (axes,) = panels("tradeoff", *settings, plain)
    assert [line.get_label() for line in lines(axes)] == ["DPSGD, 1x", "DPSGD, 4x", "RMSprop, not private"]
    assert list(lines(axes)[0].get_xdata()) == [1.0, 3.0]
    assert "batch 64, 100 epochs or batch 64, 400 epochs, delta" in axes.get_title()


@pytest.mark.parametrize("plot, colours", [("curves", ["C0", "C1"]), ("delay", ["C0"])])
def test_what_is_varied_has_its_own_colour_where_it_has_its_own_line(plot, colours):
    (axes,) = panels(plot, {"results": of_delays()})
    assert [line.get_color() for line in lines(axes)] == colours


def test_a_method_has_one_colour_in_all_panels_of_a_delay():
    other = result(method="DPRMSprop", varied={"delay": 7})
    first, second = panels("delay", {"results": [other]}, {"task": "b", "results": [other, *of_delays()]})
    assert [line.get_color() for line in lines(first)] == ["C0"]
    assert {line.get_label(): line.get_color() for line in lines(second)} == {
        "DPRMSprop": "C0",
        "DPSGD": "C1",
    }


def test_delays_of_two_settings_are_two_lines():
    (axes,) = panels("delay", *[{"label": label, "results": of_delays()} for label in ("a, b", "a, c")])
    assert [(line.get_label(), list(line.get_xdata())) for line in lines(axes)] == [
        ("DPSGD, b", [5, 20]),
        ("DPSGD, c", [5, 20]),
    ]


def test_a_figure_without_privacy_has_neither_epsilon_nor_delta():
    (axes,) = panels("losses", {"results": [result(curve=CURVE, epsilon="inf")]})
    assert axes.get_title() == "IMDB\nn = 25,000, batch 64, 100 epochs"
    assert axes.get_ylabel() == "training loss (nats per example)"


def test_a_caption_says_what_was_not_tuned():
    tuned = result(search={"runs": 60, "failed": 0, "edges": []})
    summary = report_of(tuned, result(method="DP2NoiseFloorRecipe", search=None))[0]
    assert plots._caption(summary).endswith(
        "at most 60 runs on train (seed 1000), but DP2NoiseFloor (recipe) as stated"
    )
    assert plots._caption(report_of(result())[0]) == "mean ± deviation of 5 seeds; stated hyper-parameters"
    assert "but" not in plots._caption(report_of(tuned)[0])
