"""Named private optimizers, each a row of the same composition."""

from dp2_keras.optimizers.ablations import (
    DP2AdagradExtraQuery,
    DP2AdagradNoiseFirst,
    DP2RMSpropExtraQuery,
    DP2RMSpropNoiseFirst,
)
from dp2_keras.optimizers.base import PrivateOptimizer
from dp2_keras.optimizers.dp2 import DP2Adagrad, DP2RMSprop, DP2Yogi
from dp2_keras.optimizers.dp_adaptive import DPAdagrad, DPAdam, DPRMSprop, DPYogi
from dp2_keras.optimizers.dp_sgd import DPSGD
from dp2_keras.optimizers.noise_floor import DP2NoiseFloor
from dp2_keras.optimizers.public import PDADPMD, AdaDPSAdagrad, AdaDPSRMSprop
from dp2_keras.optimizers.public_subspace import DPAdagradPublicSubspace

__all__ = [
    "AdaDPSAdagrad",
    "AdaDPSRMSprop",
    "DP2Adagrad",
    "DP2AdagradExtraQuery",
    "DP2AdagradNoiseFirst",
    "DP2NoiseFloor",
    "DP2RMSprop",
    "DP2RMSpropExtraQuery",
    "DP2RMSpropNoiseFirst",
    "DP2Yogi",
    "DPAdagrad",
    "DPAdagradPublicSubspace",
    "DPAdam",
    "DPRMSprop",
    "DPSGD",
    "DPYogi",
    "PDADPMD",
    "PrivateOptimizer",
]
