"""Figures, each from a summary alone: one panel per setting, means over seeds, deviations as bands or bars.

curves            test metric by epoch, train dotted
losses            training loss by epoch
tradeoff          test metric by epsilon
delay             test metric by s, other methods as lines across
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

_PANEL, _COLUMNS = (5.4, 4.2), 3


def draw(summary: dict[str, Any], path: str) -> None:
    """Draws the figure of a summary.

    Args:
        summary: of `summary.joined`, with a `plot`.
        path: where the image goes.
    """
    settings, panel, colours = _grouped(summary), PLOTS[summary["plot"]], _colours(summary)
    figure, all_axes = _panels(len(settings))
    for axes, setting in zip(all_axes, settings):
        if _done(setting):
            panel(axes, {**setting, "colours": colours})
        axes.set_title(_title(setting), fontsize=9)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    figure.suptitle(f"{summary['title']}\n{_caption(summary)}", fontsize=10)
    figure.savefig(path, dpi=130)


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
    """A method has the same colour in all panels."""
    methods = dict.fromkeys(r["method"] for setting in summary["settings"] for r in setting["results"])
    return {method: f"C{number}" for number, method in enumerate(methods)}


def _grouped(summary):
    """The settings; for a trade-off, those of one task in one panel."""
    if summary["plot"] != "tradeoff":
        return summary["settings"]
    panels = {}
    for setting in summary["settings"]:
        labelled = [{**result, "label": setting["label"]} for result in setting["results"]]
        panel = panels.setdefault(setting["task"], {**setting, "results": [], "sizes": []})
        panel["results"] += labelled
        panel["sizes"] += [size for size in [_size(setting)] if size not in panel["sizes"]]
    return list(panels.values())


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
    stated = sorted({result["method"] for result in results} - searched)
    words = f"best of at most {most} runs on train (seed {SEED})"
    return f"{words}, but {', '.join(stated)} as stated" if stated else words


def _title(setting):
    sizes = " or ".join(setting.get("sizes", [_size(setting)]))
    name = setting["task_title"] if "sizes" in setting else setting["label"]
    return f"{name}\nn = {setting['train_size']:,}, {sizes}, delta = {setting['delta']:g}"


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


def _name(result):
    varied = ", ".join(
        f"{'s' if name == 'delay' else name} = {value:g}" for name, value in result["varied"].items()
    )
    epsilon = f", epsilon {float(result['epsilon']):.2f}" if np.isfinite(float(result["epsilon"])) else ""
    return f"{result['method']}{f' {varied}' if varied else ''}{epsilon}"


def _curves(axes, setting):
    for result in _done(setting):
        epochs = [point["epoch"] for point in result["curve"]]
        colour = setting["colours"][result["method"]]
        _band(axes, epochs, [point["test"] for point in result["curve"]], _name(result), color=colour)
        train = [float(point["train"]["mean"]) for point in result["curve"]]
        axes.plot(epochs, train, linestyle=":", color=colour)
    _across(axes, setting)
    axes.set(xlabel="epoch", ylabel=f"{setting['metric']} (solid: test, dotted: train)")
    axes.set_ylim(*_where_curves_end(setting))


def _where_curves_end(setting):
    """The range of the second halves, where methods differ; the way there is cut off."""
    late = [point for result in _done(setting) for point in result["curve"][len(result["curve"]) // 2 :]]
    return _around([float(point[split]["mean"]) for point in late for split in ("train", "test")])


def _where_results_are(setting):
    """Their range: a trivial predictor far below would leave them none of the height."""
    spreads = [(float(r["test"]["mean"]), float(r["test"]["deviation"] or 0.0)) for r in _done(setting)]
    return _around([mean + sign * deviation for mean, deviation in spreads for sign in (-1, 1)])


def _around(values):
    low, high = np.nanmin(values), np.nanmax(values)
    margin = 0.1 * (high - low) + 1e-3
    return low - margin, high + margin


def _losses(axes, setting):
    for result in _done(setting):
        epochs = [point["epoch"] for point in result["curve"]]
        losses = [point["train_loss"] for point in result["curve"]]
        _band(axes, epochs, losses, _name(result), color=setting["colours"][result["method"]])
    axes.set(xlabel="epoch", ylabel="training loss (mean per example, nats or half squares)", yscale="log")


def _tradeoff(axes, setting):
    groups = {}
    for result in _done(setting):
        groups.setdefault((result["label"], result["method"]), []).append(result)
    several = len({label for label, _ in groups}) > 1
    for (label, method), results in groups.items():
        results = sorted(results, key=lambda result: float(result["epsilon"]))
        finite = [result for result in results if np.isfinite(float(result["epsilon"]))]
        name = f"{method}, {label}" if several else method
        if finite:
            _band(axes, [float(r["epsilon"]) for r in finite], [r["test"] for r in finite], name)
        else:
            axes.axhline(float(results[0]["test"]["mean"]), color="black", linestyle="--", label=name)
    _across(axes, setting)
    axes.set(xlabel=f"epsilon at delta = {setting['delta']:g} (RDP)", ylabel=f"test {setting['metric']}")
    axes.set_ylim(*_where_results_are(setting))


def _delay(axes, setting):
    varied = [result for result in _done(setting) if "delay" in result["varied"]]
    for method in dict.fromkeys(result["method"] for result in varied):
        own = sorted((r for r in varied if r["method"] == method), key=lambda r: r["varied"]["delay"])
        _band(axes, [r["varied"]["delay"] for r in own], [r["test"] for r in own], method)
    for number, result in enumerate(r for r in _done(setting) if not r["varied"]):
        axes.axhline(
            float(result["test"]["mean"]), color=f"C{number + 3}", linestyle="--", label=_name(result)
        )
    _across(axes, setting)
    axes.set_ylabel(f"test {setting['metric']}")
    axes.set_ylim(*_where_results_are(setting))
    _delay_axis(axes, [result["varied"]["delay"] for result in varied])


def _delay_axis(axes, delays):
    """Logarithmic, with the delays themselves as ticks."""
    axes.set(xlabel="delay s (steps)", xscale="log")
    axes.set_xticks(sorted(set(delays)), [f"{delay:,}" for delay in sorted(set(delays))])
    axes.minorticks_off()


def _second_moments(axes, setting):
    from dp2_keras.experiments.probes import BINS

    for result in _done(setting):
        histograms = result["probes"][0]["second_moments"]
        for number, histogram in enumerate(histograms):
            shade = 0.25 + 0.75 * (number + 1) / len(histograms)
            label = f"{result['method']}, step {histogram['step']:,}"
            axes.stairs(histogram["counts"], 10.0**BINS, label=label, alpha=shade)
    axes.set(xlabel="preconditioner sqrt(v) + eps", ylabel="coordinates", xscale="log", yscale="symlog")
    axes.set_xlim(*_range(_done(setting), BINS))


def _range(results, bins):
    counts = np.sum([h["counts"] for r in results for h in r["probes"][0]["second_moments"]], axis=0)
    filled = np.flatnonzero(counts)
    return 10.0 ** bins[max(filled[0] - 2, 0)], 10.0 ** bins[min(filled[-1] + 3, len(bins) - 1)]


def _staleness(axes, setting):
    found = sorted((result["varied"]["delay"], result["staleness"]) for result in _done(setting))
    axes.plot(*zip(*found), marker="o", label="max over t of E||g||₁ / (E||G/s||₁ + d eps)")
    axes.set_ylabel("h(s)")
    _delay_axis(axes, [delay for delay, _ in found])


def _across(axes, setting):
    """The best trivial predictor that is private, because it ignores all but one number."""
    name, row = next(iter(setting["trivial"].items()))
    label = f"{name} ({row['test']:.3f})"
    axes.axhline(row["test"], color="grey", linestyle="-.", linewidth=1, label=label)


PLOTS = {
    "curves": _curves,
    "losses": _losses,
    "tradeoff": _tradeoff,
    "delay": _delay,
    "second_moments": _second_moments,
    "staleness": _staleness,
}
