"""Rows become results: mean and deviation over seeds, of the metrics, the curves and the probes.

    mean = sum x / k,   deviation = sqrt(sum (x - mean)^2 / (k - 1)),   null for one seed

A summary is plain data, as `<name>.json` holds it; the report and the figures are made of it alone.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from typing import Any

from dp2_keras.experiments import tasks
from dp2_keras.experiments.store import Store, plain

_COLUMNS = """key task method seed epochs batch_size noise_multiplier delta epsilon steps seconds epoch step
train test train_loss test_loss""".split()
_CONDITIONS = ("task", "epochs", "batch_size", "train_size", "test_size", "delta")


def summarize(configuration, planned: Sequence[tuple], store: Store, options) -> dict[str, Any]:
    """All results of a configuration.

    Args:
        configuration: the table or figure.
        planned: for each case the case, the `Choice` of its search or None, and its runs.
        store: the rows.
        options: of the reproduction.

    Returns:
        Plain data: see the keys below.
    """
    labels = dict.fromkeys(case.label for case, _, _ in planned)
    return plain(
        {
            "name": configuration.name,
            "title": configuration.title,
            "source": configuration.source,
            "plot": configuration.plot,
            "settings": [_setting(label, planned, store, options) for label in labels],
        }
    )


def joined(
    summary: dict[str, Any], earlier: dict[str, Any] | None, methods: dict[str, Sequence[str]]
) -> dict[str, Any]:
    """A summary, with what an earlier one has besides: other settings, and other results of the same ones.

    Args:
        summary: of `summarize`.
        earlier: of the same table or figure, or None.
        methods: the names of all methods by the label of their setting, in order. Others do not stay.
    """
    settings = {setting["label"]: setting for setting in (earlier or {"settings": []})["settings"]}
    for setting in summary["settings"]:
        settings[setting["label"]] = _with_others(setting, settings.get(setting["label"]))
    kept = [_sorted(settings[label], names) for label, names in methods.items() if label in settings]
    return {**summary, "settings": kept}


def _with_others(setting, earlier):
    """The setting, and what there is of the earlier one if it was run alike."""
    if earlier is None or any(setting[name] != earlier[name] for name in _CONDITIONS):
        return setting
    found = {_row(result): result for result in earlier["results"]}
    for result in setting["results"]:
        if result["hyper"] is not None or _row(result) not in found:  # A call without a search ends none.
            found[_row(result)] = result
    return {**setting, "results": list(found.values())}


def _row(result):
    return result["method"], result["noise_multiplier"], *sorted(result["varied"].items())


def _sorted(setting, methods):
    known = [result for result in setting["results"] if result["method"] in methods]
    return {**setting, "results": sorted(known, key=lambda result: methods.index(result["method"]))}


def results(settings: Sequence[dict]) -> list[dict[str, Any]]:
    """Of all settings."""
    return [result for setting in settings for result in setting["results"]]


def seeds(settings: Sequence[dict]) -> str:
    """How many there are, in words; empty if nothing has run.

    Example:
    >>> seeds([{"results": [{"seeds": 5}, {"seeds": 3}, {"seeds": 5}, {"seeds": 0}]}])
    '3 or 5'
    """
    counts = sorted({result["seeds"] for result in results(settings)} - {0})
    return " or ".join(map(str, counts))


def most_runs(settings: Sequence[dict]) -> int:
    """Of a search for one result; 0 without a search."""
    return max((r["search"]["runs"] for r in results(settings) if r["search"]), default=0)


def _setting(label, planned, store, options):
    own = [entry for entry in planned if entry[0].label == label]
    case, task = own[0][0], tasks.get(own[0][0].task)
    data = tasks.load(case.task, options.data)
    return {
        "label": label,
        "task": case.task,
        "task_title": task.title,
        "metric": task.problem.metric,
        "higher_is_better": task.problem.higher_is_better,
        "epochs": case.epochs,
        "batch_size": case.batch_size,
        "train_size": data.size,
        "test_size": len(data.test[1]),
        "delta": task.delta,
        "trivial": _floats(task.problem.trivial(data.train, data.test)),
        "results": [_result(*entry, store) for entry in own],
    }


def _result(case, choice, runs, store):
    rows = store.of([run.key for run in runs])
    failed = [store.rows[run.key]["error"] for run in runs if store.rows[run.key]["status"] == "failed"]
    return {
        "method": case.method,
        "varied": case.varied,
        "noise_multiplier": case.noise_multiplier,
        "hyper": runs[0].hyper if runs else None,
        "source": "search" if choice is not None else case.source,
        "search": None
        if choice is None
        else {name: getattr(choice, name) for name in ("runs", "dropped", "failed", "edges")},
        "paper": case.paper,
        "keys": [row["key"] for row in rows],
        "seeds": len(rows),
        "errors": sorted(set(failed)),
        **(_figures(rows) if rows else {}),
    }


def _figures(rows):
    return {
        "versions": _versions(rows),
        "epsilon": rows[0]["epsilon"],
        "steps": rows[0]["steps"],
        "seconds": statistics.mean(row["seconds"] for row in rows),
        **{split: spread([row["curve"][-1][split] for row in rows]) for split in ("train", "test")},
        "curve": [_point(points) for points in zip(*(row["curve"] for row in rows))],
        "probes": [row["probes_found"] for row in rows],
        "staleness": staleness([row["probes_found"].get("staleness") for row in rows]),
    }


def _versions(rows):
    """All that ran, each once."""
    return [dict(found) for found in dict.fromkeys(tuple(row["versions"].items()) for row in rows)]


def _point(points):
    names = ("train", "test", "train_loss", "test_loss")
    spreads = {name: spread([point[name] for point in points]) for name in names}
    return {"epoch": points[0]["epoch"], "step": points[0]["step"], **spreads}


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and deviation.

    Example:
    >>> spread([1.0, 3.0])
    {'mean': 2.0, 'deviation': 1.4142135623730951}
    """
    values = [float(value) for value in values]
    if not all(map(math.isfinite, values)):
        return {"mean": math.nan, "deviation": math.nan}
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "deviation": deviation}


def staleness(runs: Sequence[list | None]) -> float | None:
    """h(s), expectations being means over runs, and the maximum over refreshes; None without its probe."""
    if None in runs or not all(runs):
        return None
    ratios = []
    for refreshes in zip(*runs):
        gradient = statistics.fmean(max(refresh["gradients"]) for refresh in refreshes)
        ratios.append(gradient / statistics.fmean(refresh["mean"] for refresh in refreshes))
    return max(ratios)


def _floats(table):
    return {name: {split: float(value) for split, value in row.items()} for name, row in table.items()}


def write_csv(summary: dict[str, Any], store: Store, path: str) -> None:
    """One line per evaluation of each run; hyper-parameters are columns."""
    rows = store.of([key for result in results(summary["settings"]) for key in result["keys"]])
    hyper = sorted({name for row in rows for name in row["hyper"]})
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*_COLUMNS, *hyper], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            for point in row["curve"]:
                writer.writerow({**row, **row["hyper"], **point})
