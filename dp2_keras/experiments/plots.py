"""Figures, each from a summary alone: one panel per task and size, means over seeds, deviations as bands.
A method has one colour in all panels; where a panel has several settings, each has its style of line.

curves            test metric by epoch, train dotted
losses            training loss by epoch
tradeoff          test metric by epsilon
delay             test metric by s, other methods across
second_moments    distribution of sqrt(v) + eps, one line per evaluation
staleness         h(s) by s
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dp2_keras.experiments.search import SEED
from dp2_keras.experiments.summary import most_runs, seeds

_PANEL, _COLUMNS = (5.4, 4.9), 3
_LONG_NAME = 36  # Two of them side by side are wider than a panel.
_STYLES, _TRAIN_STYLES = ("-", "--", "-."), (":", (0, (1, 4)), (0, (1, 7)))
_NAMES = {"DP2NoiseFloorRecipe": "DP2NoiseFloor (recipe)"}
_METRICS = {"accuracy": "accuracy", "MSE": "MSE (stars²)"}
_LOSSES = {"accuracy": "nats", "MSE": "stars²"}
_OF_THE_METRIC = ("curves", "tradeoff", "delay")  # Figures in which a trivial predictor has its say.
_BY_EPOCH = ("curves", "losses")  # Figures in which a line has one value of what is varied, not all.


def draw(summary: dict[str, Any], path: str) -> None:
    """Draws the figure of a summary.

    Args:
        summary: of `summary.joined`, with a `plot`.
        path: where the image goes.
    """
    figure_of(summary).savefig(path, dpi=130)


def figure_of(summary: dict[str, Any]) -> Figure:
    """The figure of a summary; see `draw`."""
    panels, colours = _grouped(summary), _colours(summary)
    figure, all_axes = _panels(len(panels))
    for axes, panel in zip(all_axes, panels):
        if _done(panel):
            PLOTS[summary["plot"]](axes, {**panel, "colours": colours})
        axes.set_title(_title(panel, summary["plot"]), fontsize=9)
        axes.grid(alpha=0.3)
        _legend(axes)
    figure.suptitle(f"{summary['title']}\n{_caption(summary)}", fontsize=10)
    return figure


def _legend(axes):
    """Below: inside, it hides what it is about. Long names are below each other."""
    _, names = axes.get_legend_handles_labels()
    if names:
        columns = 2 if max(map(len, names)) <= _LONG_NAME else 1
        axes.legend(fontsize=7, ncol=columns, handlelength=4, loc="upper center", bbox_to_anchor=(0.5, -0.13))


def _panels(count):
    """A figure, and as many axes, in rows of three."""
    columns, rows = min(count, _COLUMNS), math.ceil(count / _COLUMNS)
    size = (_PANEL[0] * columns, _PANEL[1] * rows + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def _colours(summary):
    """A method has the same colour in all panels; so has a varied value, where it has a line of its own."""
    varied = summary["plot"] in _BY_EPOCH
    rows = dict.fromkeys(_row(r, varied) for setting in summary["settings"] for r in setting["results"])
    return {row: f"C{number}" for number, row in enumerate(rows)}


def _row(result, varied):
    return result["method"], *(result["varied"].items() if varied else ())


def _grouped(summary):
    """The panels: settings of one task and size in one; for a trade-off, those of one task."""
    panels = {}
    for setting in summary["settings"]:
        key = setting["task"], None if summary["plot"] == "tradeoff" else _size(setting)
        panel = panels.setdefault(key, {**setting, "results": [], "parts": []})
        panel["results"] += [{**result, "label": setting["label"]} for result in setting["results"]]
        panel["parts"].append(setting)
    return list(panels.values())


def _part(panel, result):
    """What the label of a result's setting has besides the words that all labels of its panel have."""
    return ", ".join(word for word in result["label"].split(", ") if word not in _shared(panel))


def _shared(panel):
    """The words, between commas, of all labels of a panel."""
    labels = [setting["label"].split(", ") for setting in panel["parts"]]
    return [word for word in labels[0] if all(word in label for label in labels)]


def _style(panel, result):
    labels, colours = [setting["label"] for setting in panel["parts"]], panel["colours"]
    number = labels.index(result["label"]) % len(_STYLES)
    colour = colours.get(_row(result, True)) or colours[_row(result, False)]
    return {"color": colour, "linestyle": _STYLES[number]}


def _lines(panel, results):
    """Results by the line they are on: those of one setting and method."""
    groups = {}
    for result in results:
        groups.setdefault((result["label"], result["method"]), []).append(result)
    return groups.values()


def _caption(summary):
    what = "expectations over" if summary["plot"] == "staleness" else "mean ± deviation of"
    count = seeds(summary["settings"]) or "no"
    return f"{'one seed' if count == '1' else f'{what} {count} seeds'}; {_tuning(summary)}"


def _tuning(summary):
    most = most_runs(summary["settings"])
    if not most:
        return "stated hyper-parameters"
    results = [result for setting in summary["settings"] for result in _done(setting)]
    searched = {result["method"] for result in results if result["search"]}
    stated = sorted(_NAMES.get(name, name) for name in {result["method"] for result in results} - searched)
    words = f"best of at most {most} runs on train (seed {SEED})"
    return f"{words}, but {', '.join(stated)} as stated" if stated else words


def _title(panel, plot):
    parts = panel["parts"]
    name = ", ".join(_shared(panel)) or panel["task_title"]
    sizes = " or ".join(dict.fromkeys(map(_size, parts)))
    lines = [name, f"n = {panel['train_size']:,}, {sizes}{_privacy(panel)}"]
    if plot in _OF_THE_METRIC:
        trivial, row = next(iter(panel["trivial"].items()))  # The one that looks at one number alone.
        lines.append(f"{trivial}: {row['test']:.3f}")
    return "\n".join(lines)


def _privacy(panel):
    """Epsilon, if all have the same, and delta; nothing without privacy."""
    found = _epsilons(panel)
    one = f", epsilon = {min(found):.2f}" if len(found) == 1 else ""
    return f"{one}, delta = {panel['delta']:g}" if found else ""


def _epsilons(panel):
    values = (float(result["epsilon"]) for result in _done(panel))
    return {round(value, 2) for value in values if math.isfinite(value)}


def _size(setting):
    return f"batch {setting['batch_size']:,}, {setting['epochs']} epochs"


def _done(setting):
    return [result for result in setting["results"] if result["seeds"]]


def _band(axes, x, spreads, label, **style):
    mean = np.array([float(spread["mean"]) for spread in spreads])
    deviation = np.array([float(spread["deviation"] or 0.0) for spread in spreads])
    (line,) = axes.plot(x, mean, label=label, marker=".", **style)
    axes.fill_between(x, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.15, linewidth=0)
    return line


def _name(panel, result, alone=True):
    """Of a line: the method, and what is not the same for the whole panel; all of it for a result alone."""
    words = [_NAMES.get(result["method"], result["method"]), _part(panel, result)]
    if alone:
        words += [f"{'s' if name == 'delay' else name} = {x:g}" for name, x in result["varied"].items()]
        words += [f"epsilon {float(result['epsilon']):.2f}"] if _has_own_epsilon(panel, result) else []
    return ", ".join(filter(None, words))


def _has_own_epsilon(panel, result):
    return len(_epsilons(panel)) > 1 and math.isfinite(float(result["epsilon"]))


def _curves(axes, panel):
    for result in _done(panel):
        epochs, style = [point["epoch"] for point in result["curve"]], _style(panel, result)
        _band(axes, epochs, [point["test"] for point in result["curve"]], _name(panel, result), **style)
        train = [float(point["train"]["mean"]) for point in result["curve"]]
        dots = _TRAIN_STYLES[_STYLES.index(style["linestyle"])]
        axes.plot(epochs, train, linestyle=dots, color=style["color"])
    axes.set(xlabel="epoch", ylabel=f"{_METRICS[panel['metric']]} (dotted: train)")
    _zoom(axes, _where_curves_end(panel))


def _where_curves_end(panel):
    """The second halves, where methods differ; the way there is cut off."""
    late = [point for result in _done(panel) for point in result["curve"][len(result["curve"]) // 2 :]]
    return [float(point[split]["mean"]) for point in late for split in ("train", "test")]


def _where_results_are(panel):
    """A trivial predictor far below would leave them none of the height."""
    spreads = [(float(r["test"]["mean"]), float(r["test"]["deviation"] or 0.0)) for r in _done(panel)]
    return [mean + sign * deviation for mean, deviation in spreads for sign in (-1, 1)]


def _zoom(axes, values):
    """Shows the range of the values, as far as they are finite."""
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        margin = 0.1 * (max(finite) - min(finite)) + 1e-3
        axes.set_ylim(min(finite) - margin, max(finite) + margin)


def _losses(axes, panel):
    for result in _done(panel):
        epochs = [point["epoch"] for point in result["curve"]]
        losses = [point["train_loss"] for point in result["curve"]]
        _band(axes, epochs, losses, _name(panel, result), **_style(panel, result))
    axes.set(xlabel="epoch", ylabel=f"training loss ({_LOSSES[panel['metric']]} per example)", yscale="log")


def _tradeoff(axes, panel):
    for results in _lines(panel, _done(panel)):
        results.sort(key=lambda result: float(result["epsilon"]))
        name, style = _name(panel, results[0], alone=False), _style(panel, results[0])
        if math.isfinite(float(results[0]["epsilon"])):
            _band(axes, [float(r["epsilon"]) for r in results], [r["test"] for r in results], name, **style)
        else:
            _across(axes, results[0], name, **style)
    axes.set(xlabel="epsilon (RDP)", ylabel=f"test {_METRICS[panel['metric']]}")
    _zoom(axes, _where_results_are(panel))


def _across(axes, result, name, **style):
    """A result that does not depend on x."""
    mean, deviation = (float(result["test"][key] or 0.0) for key in ("mean", "deviation"))
    axes.axhline(mean, label=name, **style)
    axes.axhspan(mean - deviation, mean + deviation, color=style["color"], alpha=0.15, linewidth=0)


def _delay(axes, panel):
    varied = [result for result in _done(panel) if "delay" in result["varied"]]
    for results in _lines(panel, varied):
        results.sort(key=lambda result: result["varied"]["delay"])
        delays, name = [r["varied"]["delay"] for r in results], _name(panel, results[0], alone=False)
        _band(axes, delays, [r["test"] for r in results], name, **_style(panel, results[0]))
    for result in _done(panel):
        if not result["varied"]:
            _across(axes, result, _name(panel, result), **{**_style(panel, result), "linestyle": "--"})
    axes.set_ylabel(f"test {_METRICS[panel['metric']]}")
    _zoom(axes, _where_results_are(panel))
    _delay_axis(axes, [result["varied"]["delay"] for result in varied])


def _delay_axis(axes, delays):
    """Logarithmic, with the delays themselves as ticks."""
    axes.set(xlabel="delay s (steps)", xscale="log")
    axes.set_xticks(sorted(set(delays)), [f"{delay:,}" for delay in sorted(set(delays))])
    axes.minorticks_off()


def _second_moments(axes, panel):
    from dp2_keras.experiments.probes import BINS

    for result in _done(panel):
        histograms = result["probes"][0]["second_moments"]
        for number, histogram in enumerate(histograms):
            shade = 0.25 + 0.75 * (number + 1) / len(histograms)
            label = f"{result['method']}, step {histogram['step']:,}"
            axes.stairs(histogram["counts"], 10.0**BINS, label=label, alpha=shade)
    axes.set(xlabel="preconditioner sqrt(v) + eps", ylabel="coordinates", xscale="log", yscale="symlog")
    axes.set_xlim(*_range(_done(panel), BINS))


def _range(results, bins):
    counts = np.sum([h["counts"] for r in results for h in r["probes"][0]["second_moments"]], axis=0)
    filled = np.flatnonzero(counts)
    return 10.0 ** bins[max(filled[0] - 2, 0)], 10.0 ** bins[min(filled[-1] + 3, len(bins) - 1)]


def _staleness(axes, panel):
    for results in _lines(panel, _done(panel)):
        found = sorted((result["varied"]["delay"], result["staleness"]) for result in results)
        words = filter(None, [_part(panel, results[0]), "max over t of E||g||₁ / (E||G/s||₁ + d eps)"])
        axes.plot(*zip(*found), marker="o", label=": ".join(words))
    axes.set_ylabel("h(s)")
    _delay_axis(axes, [result["varied"]["delay"] for result in _done(panel)])


PLOTS = {
    "curves": _curves,
    "losses": _losses,
    "tradeoff": _tradeoff,
    "delay": _delay,
    "second_moments": _second_moments,
    "staleness": _staleness,
}
