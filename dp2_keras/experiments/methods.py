"""The methods, by name: an optimizer made of hyper-parameters, and the grid they are searched over.

A grid is at least as wide as the paper's (Appendix "Hyperparameters" of arXiv:2212.00309), and finer where
the paper's has fewer points than a search has runs. `delay` is the task's, in epochs, and becomes steps,
fewer than a run has.

To add a method, add an entry: a function from (hyper-parameters, `Setting`) to an optimizer, and its grid.
One that needs public examples says which share of the training data, and finds them in the setting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dp2_keras import _checks
from dp2_keras.experiments.tasks import Task

SGD_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100)
RMSPROP_RATES = (0.0001, 0.0003, 0.001, 0.002, 0.003, 0.006, 0.01, 0.03, 0.1, 0.3, 1, 3)
DELAYED_RATES = (0.001, 0.003, 0.01, 0.03, 0.06, 0.1, 0.3, 1, 3, 5, 10)
CLIPS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5)
SCALED_CLIPS = (0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20)
WEIGHT_NOISES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0)
EPS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
LEAST_EPS = 1e-18  # Of every optimizer.

_EVERY_STEP = {"learning_rate": RMSPROP_RATES, "l2_norm_clip": CLIPS, "eps": EPS}
_TASKS_DELAYS = ()
PUBLIC_FRACTION = 0.01  # The paper's: 250 reviews.
PUBLIC_BATCH_SIZE = 64  # Where there are as many public rows: the default of `compile`.
_DELAYED = {
    "learning_rate": DELAYED_RATES,
    "l2_norm_clip": SCALED_CLIPS,
    "sgd_learning_rate": SGD_RATES,
    "sgd_l2_norm_clip": CLIPS,
    "eps": EPS,
    "delay": _TASKS_DELAYS,
}
_DELAYED_SUM = {**_DELAYED, "learning_rate": SGD_RATES}  # AdaGrad's v only grows.


@dataclasses.dataclass(frozen=True)
class Setting:
    """What an optimizer is told besides its hyper-parameters.

    Attributes:
        noise_multiplier: sigma.
        batch_size: B.
        seed: of the noise and the batches.
        steps: how many there will be.
        dataset_size: n, without public examples.
        public: (x, y) of the public examples, for methods with a `public_fraction`; else None.
        task: the task's row.
    """

    noise_multiplier: float
    batch_size: int
    seed: int
    steps: int
    dataset_size: int
    public: tuple | None
    task: Task


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the registry.

    Args:
        build: makes the optimizer.
        space: for each hyper-parameter the values it is searched over.
        is_private: whether there is a clip and noise; without, sigma is 0 whatever the setting says.
        public_fraction: share of the training examples that are public to it, and not trained on.
        limits: (least, most) of hyper-parameters that have them besides those of all methods.
    """

    build: Callable[[dict[str, Any], Setting], Any]
    space: Mapping[str, Sequence[float]]
    is_private: bool = True
    public_fraction: float = 0.0
    limits: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)


def get(name: str) -> Method:
    """The method of a name.

    Raises:
        ValueError: if there is none.

    Example:
    >>> sorted(get("DPSGD").space)
    ['l2_norm_clip', 'learning_rate']
    """
    _checks.one_of(tuple(METHODS), method=name)
    return METHODS[name]


def limits(method: str, steps: int, public_rows: int = 0) -> dict[str, tuple[float, float]]:
    """What a hyper-parameter may be in a run; a search does not go past it.

    Args:
        method: its name.
        steps: of a run. A delay is shorter: with a longer one DP2 has no adaptive phase.
        public_rows: how many public examples there are, for methods that have them.

    Returns:
        (least, most) by name.

    Example:
    >>> limits("DP2RMSprop", steps=800)["delay"], limits("DP2NoiseFloor", steps=800)["power"]
    ((1, 799), (0, 1))
    """
    subspace = (1, min(PUBLIC_BATCH_SIZE, public_rows))
    found = {"delay": (1, steps - 1), "eps": (LEAST_EPS, math.inf), "subspace_size": subspace}
    for name, (least, most) in get(method).limits.items():
        lowest, highest = found.get(name, (least, most))
        found[name] = (max(least, lowest), min(most, highest))
    return found


def grid(
    method: str,
    task: Task,
    steps_per_epoch: int,
    within: Mapping[str, tuple[float, float]],
    **wider: Sequence[float],
) -> dict[str, list]:
    """The values of each hyper-parameter, in order, delays in steps.

    Args:
        method: its name.
        task: for its delays.
        steps_per_epoch: n // B.
        within: the `limits`, past which values are left out.
        **wider: values that take the place of the registry's.

    Returns:
        Lists by name, without twins.

    Raises:
        ValueError: if nothing is left of a list, before anything has run.

    Example:
    >>> from dp2_keras.experiments import tasks
    >>> grid("DP2RMSprop", tasks.get("synthetic"), 40, limits("DP2RMSprop", steps=40))["delay"]
    [4, 10, 20]
    """
    space = {**get(method).space, **wider}
    if space.get("delay") == _TASKS_DELAYS:
        space["delay"] = [max(within["delay"][0], round(d * steps_per_epoch)) for d in task.delays]
    found = {}
    for name, values in space.items():
        least, most = within.get(name, (-math.inf, math.inf))
        found[name] = sorted({value for value in values if least <= value <= most})
        if not found[name]:
            rule = f"between {least} and {most} somewhere, in this run of {method}"
            _checks.fail(rule, **{name: list(values)})
    return found


def _private(name, **from_setting):
    """The library's optimizer of that name, with arguments that are attributes of the setting."""

    def build(hyper, setting):
        import dp2_keras

        shared = dict(noise_multiplier=setting.noise_multiplier, noise_seed=setting.seed)
        shared.update({argument: getattr(setting, found) for argument, found in from_setting.items()})
        return getattr(dp2_keras, name)(**hyper, **shared)

    return build


def _plain(name):
    """The same without clip and noise. Its batches are those of the seed, too."""

    def build(hyper, setting):
        import dp2_keras

        free = dict(l2_norm_clip=math.inf, noise_multiplier=0.0, noise_seed=setting.seed)
        return getattr(dp2_keras, name)(**hyper, **free)

    return build


def _without_clips(space):
    return {name: values for name, values in space.items() if "clip" not in name}


METHODS = {
    "SGD": Method(_plain("DPSGD"), {"learning_rate": SGD_RATES}, is_private=False),
    "RMSprop": Method(_plain("DPRMSprop"), _without_clips(_EVERY_STEP), is_private=False),
    "DelayedRMSprop": Method(_plain("DP2RMSprop"), _without_clips(_DELAYED), is_private=False),
    "DelayedAdagrad": Method(_plain("DP2Adagrad"), _without_clips(_DELAYED_SUM), is_private=False),
    "DelayedYogi": Method(_plain("DP2Yogi"), _without_clips(_DELAYED), is_private=False),
    "DPSGD": Method(_private("DPSGD"), {"learning_rate": SGD_RATES, "l2_norm_clip": CLIPS}),
    "DPRMSprop": Method(_private("DPRMSprop"), _EVERY_STEP),
    "DPAdagrad": Method(_private("DPAdagrad"), {**_EVERY_STEP, "learning_rate": SGD_RATES}),
    "DPYogi": Method(_private("DPYogi"), _EVERY_STEP),
    "DPAdam": Method(_private("DPAdam"), _EVERY_STEP),
    "DP2RMSprop": Method(_private("DP2RMSprop"), _DELAYED),
    "DP2Adagrad": Method(_private("DP2Adagrad"), _DELAYED_SUM),
    "DP2Yogi": Method(_private("DP2Yogi"), _DELAYED),
    "DP2RMSpropExtraQuery": Method(
        _private("DP2RMSpropExtraQuery"), _DELAYED, limits={"delay": (2, math.inf)}
    ),
    "DP2RMSpropNoiseFirst": Method(
        _private("DP2RMSpropNoiseFirst"),
        {**_without_clips(_DELAYED), "l2_norm_clip": CLIPS},  # One clip, of gradients as they are.
    ),
    "DP2NoiseFloor": Method(
        _private("DP2NoiseFloor"),
        {"weight_noise": WEIGHT_NOISES, "l2_norm_clip": CLIPS, "power": (0.25, 0.5, 0.75, 1.0)},
        limits={"power": (0, 1)},
    ),
    "DP2NoiseFloorRecipe": Method(_private("DP2NoiseFloor"), {}),  # Not tuned: as docs/recipes.md says.
    "AdaDPSRMSprop": Method(
        _private("AdaDPSRMSprop"),
        {"learning_rate": DELAYED_RATES, "l2_norm_clip": SCALED_CLIPS, "eps": EPS},
        public_fraction=PUBLIC_FRACTION,
    ),
    "AdaDPSAdagrad": Method(
        _private("AdaDPSAdagrad"),
        {"learning_rate": SGD_RATES, "l2_norm_clip": SCALED_CLIPS, "eps": EPS},
        public_fraction=PUBLIC_FRACTION,
    ),
    "PDADPMD": Method(
        _private("PDADPMD", total_steps="steps"),
        {"learning_rate": SGD_RATES, "l2_norm_clip": CLIPS},
        public_fraction=PUBLIC_FRACTION,
    ),
    "DPAdagradPublicSubspace": Method(
        _private("DPAdagradPublicSubspace"),
        {"learning_rate": SGD_RATES, "l2_norm_clip": CLIPS, "eps": EPS, "subspace_size": (5, 10, 20, 40)},
        public_fraction=PUBLIC_FRACTION,
    ),
}
