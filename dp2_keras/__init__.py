"""Differentially private Keras, with adaptive optimizers that keep their advantage.

DP² (Differentially Private Adaptive Optimization with Delayed Preconditioners,
https://arxiv.org/abs/2212.00309) for TensorFlow and Keras:

    model = dp2_keras.make_private(model)
    model.compile(optimizer=dp2_keras.DP2RMSprop(...), loss=...)
    model.fit(x, y)
"""

from dp2_keras.errors import NonPrivateUpdateError
from dp2_keras.model import DP2Model, DP2Sequential, make_private, unwrap
from dp2_keras.operations import declare_per_example
from dp2_keras.optimizers import (
    DPSGD,
    DP2Adagrad,
    DP2RMSprop,
    DP2Yogi,
    DPAdagrad,
    DPAdam,
    DPRMSprop,
)
from dp2_keras.schedule import Phase

__version__ = "0.1.0"

__all__ = [
    "DP2Adagrad",
    "DP2Model",
    "DP2RMSprop",
    "DP2Sequential",
    "DP2Yogi",
    "DPAdagrad",
    "DPAdam",
    "DPRMSprop",
    "DPSGD",
    "NonPrivateUpdateError",
    "Phase",
    "declare_per_example",
    "make_private",
    "unwrap",
]
