"""A table or figure of the paper as data: `configurations/<name>.json`.

title, source      what it is, and where in arXiv:2212.00309
kind               "table" or "figure": which option of the command names it
plot               a name in `plots.PLOTS`, or null
seeds              how many
evaluations        how often a run is evaluated, at most
probes             what else is measured: names in `probes.PROBES`
settings           a list of
    label, task, epochs, batch_size
    noise_multiplier   a number, or a list of them, each of which is a setting of its own;
    match              or the label of a setting, to each of whose epsilons the noise is calibrated
    methods            by name:
        hyper          hyper-parameters by name; null where the paper prints none and we have none: search
        source         "paper" or "ours": who chose them
        paper          [mean, deviation] that the paper prints, or null
        vary           {name: values}: one result for each value, one name at a time
        space          {name: values} in place of the registry's grid; whole numbers stay whole
quick              keys that take the place of those above: minutes, on data that needs no file. What is made
                   so has a name of its own, `<name>-quick`, and leaves the whole table alone
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from typing import Any

from dp2_keras import _checks
from dp2_keras.experiments import methods, tasks

_KEYS = {"title", "source", "kind", "plot", "seeds", "evaluations", "probes", "settings", "quick"}
_SETTING_KEYS = {"label", "task", "epochs", "batch_size", "noise_multiplier", "match", "methods"}
_METHOD_KEYS = {"hyper", "source", "paper", "vary", "space"}
PLOTS = ("curves", "losses", "tradeoff", "delay", "second_moments", "staleness")
PROBES = ("second_moments", "staleness")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table: a method in a setting, for all seeds."""

    label: str
    task: str
    epochs: int
    batch_size: int
    noise_multiplier: float | None
    match: dict[str, Any] | None
    method: str
    hyper: dict[str, Any] | None
    source: str
    paper: list[float] | None
    space: dict[str, list]
    varied: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What a file says, checked; see the top of this file. `methods` are by label, also without `cases`."""

    name: str
    title: str
    source: str
    kind: str
    plot: str | None
    seeds: int
    evaluations: int
    probes: tuple[str, ...]
    methods: dict[str, tuple[str, ...]]
    cases: tuple[Case, ...]

    def only(self, task_names: list[str] | None = None, method_names: list[str] | None = None):
        """The part of its cases that concerns some tasks and methods."""
        kept = [
            case
            for case in self.cases
            if case.task in (task_names or [case.task]) and case.method in (method_names or [case.method])
        ]
        return dataclasses.replace(self, cases=tuple(kept))


def names(kind: str | None = None) -> list[str]:
    """The names of all configurations, or of those of a kind.

    Example:
    >>> names("table")
    ['ablations', 'main', 'practical', 'practical-public', 'recipe', 'small-batches']
    """
    files = importlib.resources.files("dp2_keras.experiments").joinpath("configurations").iterdir()
    found = sorted(file.name[: -len(".json")] for file in files if file.name.endswith(".json"))
    return [name for name in found if kind in (None, document(name)["kind"])]


def quick_name(name: str) -> str:
    """What the reduction of a configuration is called.

    Example:
    >>> quick_name("main")
    'main-quick'
    """
    return f"{name}-quick"


def document(name: str) -> dict[str, Any]:
    """A file as it is."""
    file = importlib.resources.files("dp2_keras.experiments").joinpath("configurations", f"{name}.json")
    return json.loads(file.read_text(encoding="utf-8"))


def load(name: str, quick: bool = False) -> Configuration:
    """Reads and checks a configuration.

    Args:
        name: of the table or figure.
        quick: take its reduction.

    Raises:
        ValueError: for a name that is not known, or a file that is not as the top of this file says.

    Example:
    >>> load("main", quick=True).cases[0].task
    'synthetic'
    """
    _checks.one_of(tuple(names()), configuration=name)
    return parse(name, document(name), quick)


def parse(name: str, document: dict[str, Any], quick: bool = False) -> Configuration:
    """Checks a document.

    Raises:
        ValueError: if it is not as the top of this file says.
    """
    document = {**document, **(document["quick"] if quick else {})}
    _check_keys(document, _KEYS, f"configuration {name!r}")
    _checks.one_of(("table", "figure"), kind=document["kind"])
    _checks.one_of((None, *PLOTS), plot=document["plot"])
    _checks.positive_integer(seeds=document["seeds"], evaluations=document["evaluations"])
    for probe in document["probes"]:
        _checks.one_of(PROBES, probe=probe)
    settings = document["settings"]
    return Configuration(
        name=quick_name(name) if quick else name,
        title=f"{document['title']}, a quick look" if quick else document["title"],
        **{key: document[key] for key in ("source", "kind", "plot", "seeds", "evaluations")},
        probes=tuple(document["probes"]),
        methods={setting["label"]: tuple(setting["methods"]) for setting in settings},
        cases=tuple(case for setting in settings for case in _cases(setting, settings)),
    )


def _cases(setting, settings):
    _check_keys(setting, _SETTING_KEYS, "setting")
    tasks.get(setting["task"])
    for noise in _noises(setting, settings):
        for method, spec in setting["methods"].items():
            yield from _of_method(setting, noise, method, spec)


def _noises(setting, settings):
    """The noise of each case of a setting: a number, or what to match."""
    if ("match" in setting) == ("noise_multiplier" in setting):
        raise ValueError(f"One of `match` and `noise_multiplier` must be given. Received: {setting}")
    if "noise_multiplier" in setting:
        return [{"noise_multiplier": sigma, "match": None} for sigma in _as_list(setting["noise_multiplier"])]
    (other,) = [other for other in settings if other["label"] == setting["match"]]
    sizes = {key: other[key] for key in ("epochs", "batch_size")}
    return [
        {"noise_multiplier": None, "match": {**sizes, "noise_multiplier": sigma}}
        for sigma in _as_list(other["noise_multiplier"])
    ]


def _of_method(setting, noise, method, spec):
    _check_keys(spec, _METHOD_KEYS, f"method {method!r}")
    _checks.one_of(("paper", "ours"), source=spec["source"])
    space = methods.get(method).space
    if space and spec["hyper"] is not None and not set(spec["hyper"]) <= set(space) | {"rho"}:
        _checks.fail(f"of {sorted(space)}", hyper=spec["hyper"])
    for varied in _varied(spec.get("vary", {})):
        yield Case(
            **{key: setting[key] for key in ("label", "task", "epochs", "batch_size")},
            **noise,
            method=method,
            **{key: spec[key] for key in ("hyper", "source")},
            paper=spec.get("paper"),
            space=spec.get("space", {}),
            varied=varied,
        )


def _varied(vary):
    return [{name: value} for name, values in vary.items() for value in values] or [{}]


def _as_list(value):
    return value if isinstance(value, list) else [value]


def _check_keys(document, known, what):
    unknown = set(document) - known
    if unknown:
        raise ValueError(f"A {what} must have keys of {sorted(known)}. Received: {sorted(unknown)}")
