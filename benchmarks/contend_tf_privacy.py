"""TF Privacy on Keras 2, by `model.fit`: python contend_tf_privacy.py WORKLOAD CONTENDER

DP-SGD: `tfp-vectorized` is its optimizer VectorizedDPKerasSGDOptimizer, `tfp-dpmodel` its DPModel, which
compiles the step with XLA, and `tfp-fast` the DPModel with a registry of layers whose norms are known.
None can scale gradients before they are clipped, as DP2 does.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_models
import keras_turns
import tensorflow_privacy
import workloads
from tensorflow_privacy.privacy.fast_gradient_clipping import gradient_clipping_utils, layer_registry
from tensorflow_privacy.privacy.fast_gradient_clipping.registry_functions import (
    layer_normalization,
    multi_head_attention,
)
from tensorflow_privacy.privacy.keras_models import dp_keras_model

PRIVACY = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0}


def vectorized(model, loss, workload):
    """The model with the optimizer that maps over the examples."""
    loss.reduction = keras.losses.Reduction.NONE
    optimizer = tensorflow_privacy.VectorizedDPKerasSGDOptimizer(
        **PRIVACY, num_microbatches=workload.batch_size, learning_rate=1e-3
    )
    model.compile(optimizer, loss=loss)
    return model


def dpmodel(model, loss, workload, registry=None):
    """The model as a DPModel, whose train step maps over the examples."""
    model = dp_keras_model.DPModel(
        **PRIVACY, layer_registry=registry, inputs=model.inputs, outputs=model.outputs
    )
    model.compile(keras.optimizers.SGD(1e-3), loss=loss)
    return model


def fast(model, loss, workload):
    """The model as a DPModel that clips by norms; it would fall back without a word, so that is an error."""
    registry = layer_registry.make_default_layer_registry()
    registry.insert(keras.layers.LayerNormalization, layer_normalization.layer_normalization_computation)
    registry.insert(
        keras.layers.MultiHeadAttention, multi_head_attention.multi_head_attention_layer_computation
    )
    if not gradient_clipping_utils.all_trainable_layers_are_registered(model, registry):
        raise ValueError("A layer is not in TF Privacy's registry, so DPModel would not clip by norms.")
    return dpmodel(model, loss, workload, registry)


def main(workload, name):
    private = {"tfp-vectorized": vectorized, "tfp-dpmodel": dpmodel, "tfp-fast": fast}[name]
    keras_turns.fit(private(*keras_models.build(workload), workload), workload)


if __name__ == "__main__":
    main(workloads.WORKLOADS[sys.argv[1]], sys.argv[2])
