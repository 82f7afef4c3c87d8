"""Growth of time and memory with size: the figure and the fitted exponents."""

from __future__ import annotations

import contenders
import numpy as np
import workloads
from matplotlib import pyplot, ticker

SIZES = {
    "width": "width of a Dense layer (batch 64)",
    "batch": "batch (Dense layer of width 1,024)",
    "length": "tokens in a sequence of W5 (batch 32)",
}
MEASURES = {"ms": "ms a step", "peak_mb": "peak MB of the process"}
COLUMNS = [f"{words}, {size}" for words in ("time", "memory") for size in SIZES]
# Okabe and Ito's colours, which differ for every reader.
COLOURS = ["#000000", "#0072B2", "#D55E00", "#CC79A7", "#009E73"]
MARKERS = "osD^v"


def racers():
    """The contenders that run the growth workloads."""
    return [contender.name for contender in contenders.CONTENDERS if contender.growth]


def points(measured, contender, size, key):
    """Sizes and values of one line, without those that failed."""
    for workload in workloads.GROWTH:
        entry = measured.get(workload.name, {}).get(contender, {})
        if workload.name.startswith(size + "-") and key in entry:
            yield int(workload.name.split("-")[1]), entry[key]


def exponent(measured, contender, size, key):
    """The exponent of a power law through the three largest sizes."""
    pairs = list(points(measured, contender, size, key))[-3:]
    if len(pairs) < 3:
        return "–"
    return f"{np.polyfit(*np.log(pairs).T, 1)[0]:.2f}"


def exponent_rows(measured):
    """A row of exponents for each contender, in the order of COLUMNS."""
    for name in racers():
        yield [f"`{name}`", *(exponent(measured, name, size, key) for key in MEASURES for size in SIZES)]


INCREMENT_COLUMNS = [
    "last doubling",
    *(f"`{name}`, MB" for name in ("keras", "dp2-sgd", "dp2-adaptive")),
    "product, MB",
]
# Bytes of a gradient for each example that the last doubling of a size adds to.
PRODUCTS = {
    "width-4096": ("width-2048", 4 * 64 * (4096**2 - 2048**2)),
    "batch-1024": ("batch-512", 4 * 512 * 1024**2),
}


def increment_rows(measured):
    """How much memory the last doubling of a size added, beside what examples x weights would take."""
    for large, (small, product) in PRODUCTS.items():
        if large in measured and small in measured:
            names = ("keras", "dp2-sgd", "dp2-adaptive")
            grown = [measured[large][name]["peak_mb"] - measured[small][name]["peak_mb"] for name in names]
            yield [f"{small} to {large}", *(f"{mb:,.0f}" for mb in grown), f"{product / 2**20:,.0f}"]


def plot(measured, path):
    """Saves the figure: a column for each size, time above memory."""
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 7), sharex="col", sharey="row", layout="constrained")
    for line, (key, value_words) in zip(axes, MEASURES.items()):
        for axis, (size, size_words) in zip(line, SIZES.items()):
            _draw(axis, measured, size, key)
            axis.set(
                xlabel=size_words if key == "peak_mb" else "", ylabel=value_words if size == "width" else ""
            )
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(path, dpi=120)


def _draw(axis, measured, size, key):
    for name, colour, marker in zip(racers(), COLOURS, MARKERS):
        pairs = list(points(measured, name, size, key))
        axis.plot(*zip(*pairs) if pairs else ([], []), color=colour, marker=marker, label=name)
    ticks = [int(w.name.split("-")[1]) for w in workloads.GROWTH if w.name.startswith(size)]
    axis.set(xscale="log", yscale="log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
