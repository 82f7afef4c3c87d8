"""Differentially private Keras, with adaptive optimizers that keep their advantage.

DP² (Differentially Private Adaptive Optimization with Delayed Preconditioners,
https://arxiv.org/abs/2212.00309) for TensorFlow and Keras:

    model = dp2_keras.make_private(model)
    model.compile(optimizer=dp2_keras.DP2RMSprop(...), loss=...)
    model.fit(x, y)

Names are imported when they are first used, so that the accounting and the `dp2` command
start without TensorFlow.
"""

import importlib
import sys

__version__ = "0.2.0.dev0"

_MODULES = {
    "accounting": "calibrate_noise_multiplier default_delta",
    "callbacks": "PrivacyBudget",
    "errors": "BudgetExhaustedError NonPrivateUpdateError",
    "ledger": "Ledger",
    "model": "DP2Model DP2Sequential make_private unwrap",
    "operations": "declare_per_example",
    "optimizers": "DPSGD DP2Adagrad DP2RMSprop DP2Yogi DPAdagrad DPAdam DPRMSprop "
    "DP2AdagradExtraQuery DP2AdagradNoiseFirst DP2RMSpropExtraQuery DP2RMSpropNoiseFirst "
    "AdaDPSAdagrad AdaDPSRMSprop PDADPMD DPAdagradPublicSubspace",
    "sampling": "poisson_batches",
    "schedule": "Phase",
    "tensorboard": "PrivacyTensorBoard",
}
_SUBMODULES = ("accounting", "data")
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name):
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOMES, *_SUBMODULES})


if "keras" in sys.modules:  # Register the classes, so that `keras.saving.load_model` knows them.
    importlib.import_module(f"{__name__}.model")
