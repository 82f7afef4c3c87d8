"""The report: one Markdown file of all tables and figures that are in a directory.

Each section is made of a summary alone, `<name>.json`. Results stand beside the paper's printed ones, with
trivial predictors as rows, every epsilon, and how many runs the search for the hyper-parameters took.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

from dp2_keras.experiments import configuration as configurations
from dp2_keras.experiments import summary as summaries

_HEAD = """# Experiments of arXiv:2212.00309, run with dp2_keras

Results are mean ± standard deviation over seeds. Train and test metrics are taken on all examples of a
split, at the end of a run; they are exact figures of the data, not covered by epsilon. **Epsilon does not
cover a search for hyper-parameters**, ours or the paper's. Seeds make runs repeatable, and so void the
guarantee of these very runs: epsilon is what the same run costs with secret noise. It is the RDP bound for
Poisson sampling, one example added or removed. *Edge*: the best value of these hyper-parameters stands at an
end of its list, or past it, and the next one outwards is possible, but was not run.
"""


def write(summary: dict[str, Any], out: str) -> None:
    """Writes a summary, its figure, and the report anew.

    Args:
        summary: of `summary.joined`.
        out: the directory.
    """
    path = os.path.join(out, summary["name"])
    _replace(f"{path}.json", json.dumps(summary, indent=1, allow_nan=False))
    if summary["plot"]:
        from dp2_keras.experiments import plots

        plots.draw(summary, f"{path}.png")
    _replace(os.path.join(out, "report.md"), render(_found(out)))


def read(out: str, name: str) -> dict[str, Any] | None:
    """The summary of that name in a directory, if there is one."""
    path = os.path.join(out, f"{name}.json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _found(out):
    """All summaries in a directory, in the order of their names, tables first, a look after what it is of."""
    names = [name for kind in ("table", "figure") for name in configurations.names(kind)]
    both = [found for name in names for found in (name, configurations.quick_name(name))]
    return [found for found in (read(out, name) for name in both) if found]


def _replace(path, text):
    with open(path + ".part", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".part", path)


def render(found: list[dict[str, Any]]) -> str:
    """The report of some summaries, as Markdown."""
    return "\n".join([_HEAD, *(line for summary in found for line in _section(summary))]) + "\n"


def _section(summary):
    yield f"## {summary['title']}\n\n{summary['source']}. {_effort(summary)}\n"
    if summary["plot"]:
        yield f"![{summary['title']}]({summary['name']}.png)\n"
    for setting in summary["settings"]:
        yield f"### {setting['label']}\n\n{_conditions(setting)}\n"
        yield from _table(setting)
        yield from _errors(setting)
        yield ""
    yield f"Versions: {_versions(summary)}.\n"


def _effort(summary):
    most = summaries.most_runs(summary["settings"])
    if not most:
        return "Hyper-parameters as stated, without a search of ours."
    return (
        "The winner of a random search, selected on the training metric, with another seed: "
        f"at most {most} runs for each method. 0 runs: as stated."
    )


def _versions(summary):
    """Of all results: runs may be of several days."""
    numbers = {}
    for result in summaries.results(summary["settings"]):
        for name, number in (pair for found in result.get("versions", []) for pair in found.items()):
            numbers.setdefault(name, {})[number] = None
    return ", ".join(f"{name} {' or '.join(found)}" for name, found in numbers.items()) or "none"


def _conditions(setting):
    return (
        f"{setting['task_title']}: {setting['train_size']:,} training and {setting['test_size']:,} test "
        f"examples, "
        f"batches of {setting['batch_size']:,}, {setting['epochs']} epochs, delta = {setting['delta']:g}, "
        f"seeds: {summaries.seeds([setting]) or 'none'}. "
        f"{setting['metric']}, {'higher' if setting['higher_is_better'] else 'lower'} is better."
    )


def _table(setting):
    yield "| method | sigma | epsilon | train | test | paper, test | steps | hyper-parameters | search runs |"
    yield "|---|---|---|---|---|---|---|---|---|"
    reached = _steps_to_reach(setting)
    for number, result in enumerate(setting["results"]):
        yield _line(result, reached.get(number))
    for name, row in setting["trivial"].items():
        yield f"| *{name}* | – | – | {_number(row['train'])} | {_number(row['test'])} | – | – | – | – |"


def _line(result, reached):
    varied = ", ".join(f"{name} = {value:g}" for name, value in result["varied"].items())
    cells = [f"{result['method']}{f' ({varied})' if varied else ''}", f"{result['noise_multiplier']:g}"]
    if result["seeds"]:
        cells += [_epsilon(result["epsilon"]), _mean(result["train"]), _mean(result["test"])]
    else:
        cells += ["–", "–", "all failed" if result["errors"] else "no hyper-parameters: search"]
    cells.append(_spread(*result["paper"]) if result["paper"] else "–")
    cells.append(f"{result['steps']:,}{reached or ''}" if result["seeds"] else "–")
    if result.get("staleness") is not None:
        cells[-1] += f" (h(s) = {float(result['staleness']):.2f})"
    cells += [_hyper(result), _search(result)]
    return f"| {' | '.join(cells)} |"


def _steps_to_reach(setting):
    """For each result, when it first was as good on test as DP-SGD in the end; if there are curves.

    How many times faster that is, is counted from when DP-SGD itself first was, not from its last step.
    """
    final = [result for result in setting["results"] if result["method"] == "DPSGD" and result["seeds"]]
    if len(final) != 1 or len(final[0]["curve"]) < 5:
        return {}
    target = final[0]["test"]["mean"]
    first = _first_step(setting, final[0], target)
    if first is None:  # DP-SGD came to nothing that can be compared with.
        return {}
    return {
        number: f" ({_speed(_first_step(setting, result, target), first)})"
        for number, result in enumerate(setting["results"])
    }


def _first_step(setting, result, target):
    """The first step of a curve that is as good on test as a target; None if there is none."""
    sign = 1 if setting["higher_is_better"] else -1
    good = [p for p in result.get("curve", []) if sign * float(p["test"]["mean"]) >= sign * float(target)]
    return good[0]["step"] if good else None


def _speed(reached, dp_sgd):
    if reached is None:
        return "never as good as DP-SGD's end"
    return f"DP-SGD's end reached after {reached:,}, {dp_sgd / reached:.1f}x"


def _search(result):
    found = result["search"]
    if found is None:
        return "0"
    dropped = f", {found['dropped']} not to the end" if found.get("dropped") else ""
    failed = f", {found['failed']} without a result" if found["failed"] else ""
    edges = f"; **edge**: {', '.join(found['edges'])}" if found["edges"] else ""
    return f"{found['runs']}{dropped}{failed}{edges}"


def _hyper(result):
    if result["hyper"] is None:
        return "–"
    words = ", ".join(f"{name} {value:g}" for name, value in result["hyper"].items()) or "defaults"
    return f"{words} ({result['source']})"


def _errors(setting):
    for result in setting["results"]:
        for error in result["errors"]:
            yield f"\n{result['method']} failed: {' '.join(error.split())[:300]}"


def _mean(spread):
    return _spread(spread["mean"], spread["deviation"])


def _spread(mean, deviation):
    return _number(mean) if deviation is None else f"{_number(mean)} ± {_number(deviation)}"


def _number(value):
    return f"{float(value):.3f}"


def _epsilon(value):
    return "∞" if math.isinf(float(value)) else f"{float(value):.4f}"
