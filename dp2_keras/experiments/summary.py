"""Rows become results: mean and deviation over seeds, of the metrics, the curves and the probes.

    mean = sum x / k,   deviation = sqrt(sum (x - mean)^2 / (k - 1)),   null for one seed

A summary is plain data, as `<name>.json` holds it; the report and the figures are made of it alone.
"""

from __future__ import annotations

import csv
import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

from dp2_keras.experiments import tasks
from dp2_keras.experiments.store import Store, plain

_COLUMNS = """key task method seed epochs batch_size noise_multiplier delta epsilon steps seconds epoch step
train test train_loss test_loss""".split()


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
    rows = [row for _, _, runs in planned for row in store.of([run.key for run in runs])]
    write_csv(rows, os.path.join(options.out, f"{configuration.name}.csv"))
    return plain(
        {
            "name": configuration.name,
            "title": configuration.title,
            "source": configuration.source,
            "plot": configuration.plot,
            "search": options.search and options.search + options.refine,
            "seeds": options.seeds or configuration.seeds,
            "versions": rows[0]["versions"] if rows else {},
            "settings": [_setting(label, configuration, planned, store, options) for label in labels],
        }
    )


def _setting(label, configuration, planned, store, options):
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
        "seeds": len(rows),
        "errors": sorted(set(failed)),
        **(_figures(rows) if rows else {}),
    }


def _figures(rows):
    return {
        "epsilon": rows[0]["epsilon"],
        "steps": rows[0]["steps"],
        "seconds": statistics.mean(row["seconds"] for row in rows),
        **{split: spread([row["curve"][-1][split] for row in rows]) for split in ("train", "test")},
        "curve": [_point(points) for points in zip(*(row["curve"] for row in rows))],
        "probes": [row["probes_found"] for row in rows],
        "staleness": staleness([row["probes_found"].get("staleness") for row in rows]),
    }


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


def write_csv(rows: Sequence[dict], path: str) -> None:
    """One line per evaluation of each run; hyper-parameters are columns."""
    hyper = sorted({name for row in rows for name in row["hyper"]})
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*_COLUMNS, *hyper], extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            for point in row["curve"]:
                writer.writerow({**row, **row["hyper"], **point})
