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

from dp2_keras._lazy import exports

__version__ = "0.2.0.dev0"

_MODULES = {
    "accounting": "default_delta",
    "auditing": "Audit audit",
    "calibration": "calibrate_noise_multiplier",
    "callbacks": "PrivacyBudget",
    "errors": "BudgetExhaustedError NonPrivateUpdateError",
    "ledger": "Ledger",
    "model": "DP2Model DP2Sequential make_private unwrap",
    "operations": "declare_per_example",
    "optimizers": "DPSGD DP2Adagrad DP2NoiseFloor DP2RMSprop DP2Yogi DPAdagrad DPAdam DPRMSprop DPYogi "
    "DP2AdagradExtraQuery DP2AdagradNoiseFirst DP2RMSpropExtraQuery DP2RMSpropNoiseFirst "
    "AdaDPSAdagrad AdaDPSRMSprop PDADPMD DPAdagradPublicSubspace",
    "sampling": "poisson_batches",
    "schedule": "Phase",
    "tensorboard": "PrivacyTensorBoard",
}
__getattr__, __dir__, __all__ = exports(__name__, _MODULES, submodules=("accounting", "data"))  # noqa: PLE0605

if "keras" in sys.modules:  # Register the classes, so that `keras.saving.load_model` knows them.
    importlib.import_module(f"{__name__}.model")
