"""Plain Keras and this package, by `model.fit`: python contend_keras.py WORKLOAD CONTENDER

`keras` is RMSprop without privacy; `dp2-sgd` and `dp2-adaptive` are the two phases of DP2RMSprop,
`dp2-vectorized-sgd` and `-adaptive` the same without ghost clipping.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_models
import keras_turns
import workloads


def compiled(name, model, loss):
    jit = True if name.startswith("jit-") else "auto"
    name = name.removeprefix("jit-")
    if name == "keras":
        model.compile(keras.optimizers.RMSprop(1e-3), loss=loss, jit_compile=jit)
        return model
    import dp2_keras as dp2

    # A phase that never ends: SGD from the start, or adaptive after the first step.
    never = 10**9
    steps = {
        "sgd": {"sgd_steps": never, "adaptive_steps": 1},
        "adaptive": {"sgd_steps": 1, "adaptive_steps": never},
    }
    optimizer = dp2.DP2RMSprop(
        learning_rate=1e-3, l2_norm_clip=1.0, noise_multiplier=1.0, **steps[name.rsplit("-", 1)[-1]]
    )
    model = dp2.make_private(model)
    model.compile(
        optimizer, loss=loss, method="vectorized" if "vectorized" in name else "auto", jit_compile=jit
    )
    return model


def main(workload, name):
    keras_turns.fit(compiled(name, *keras_models.build(workload)), workload)


if __name__ == "__main__":
    main(workloads.WORKLOADS[sys.argv[1]], sys.argv[2])
