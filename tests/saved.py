"""Optimizers with no argument at its default, models of every kind, and what resuming means."""

import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest

import dp2_keras as dp2

KERAS_3 = hasattr(keras, "StatelessScope")
FEATURES, BATCH = 3, 4
DELAY = 3  # Steps 0-2 are SGD, 3-5 adaptive, 6-8 SGD.

# Every argument of every optimizer, none at its default. Rates are exact in float32.
SHARED = dict(
    learning_rate=0.5, l2_norm_clip=1.5, noise_multiplier=0.7, expected_batch_size=BATCH, noise_seed=1,
    noise="secure",
    weight_decay=0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=5,
    num_microbatches=BATCH, name="mine",
)  # fmt: skip
DELAYED = dict(
    SHARED, eps=1e-3, delay=DELAY, sgd_steps=None, adaptive_steps=None, sgd_learning_rate=0.25,
    sgd_l2_norm_clip=0.75, bias_correction=True,
)  # fmt: skip
OPTIMIZERS = {
    "DP2RMSprop": dict(DELAYED, rho=0.8),
    "DP2Adagrad": dict(DELAYED, delay=None, sgd_steps=2, adaptive_steps=4),
    "DP2Yogi": dict(DELAYED, rho=0.8),
    "DP2NoiseFloor": dict(SHARED, delay=2, power=0.25, weight_noise=0.25, shrinkage=2.0, pilot_share=0.1),
    "DP2RMSpropNoiseFirst": dict(DELAYED, rho=0.8),
    "DP2AdagradExtraQuery": DELAYED,
    "DPSGD": SHARED,
    "DPRMSprop": dict(SHARED, eps=1e-3, rho=0.8),
    "DPAdagrad": dict(SHARED, eps=1e-3),
    "DPYogi": dict(SHARED, rho=0.8, eps=1e-3),
    "DPAdam": dict(SHARED, eps=1e-3, beta_1=0.7, beta_2=0.95),
    "AdaDPSRMSprop": dict(SHARED, eps=1e-3, rho=0.8, public_second_moments=None),
    "AdaDPSAdagrad": dict(SHARED, eps=1e-3, public_second_moments=None),
    "PDADPMD": dict(SHARED, total_steps=6, alpha=None),
    "DPAdagradPublicSubspace": dict(SHARED, eps=1e-3, subspace_size=2),
}
NEEDED = {
    "PDADPMD": {"alpha": 0.5},
    "DPAdagradPublicSubspace": {"subspace_size": 2},
}  # By those that have arguments without a default.
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
each_delayed_optimizer = pytest.mark.parametrize("name", ["DP2RMSprop", "DP2Adagrad", "DP2Yogi"])


def optimizer_of(name, **changes):
    return getattr(dp2, name)(**{**OPTIMIZERS[name], **changes})


def least(name, **changes):
    """The optimizer with nothing but what it cannot do without."""
    needed = {"delay": 2} if name.startswith("DP2") else NEEDED.get(name, {})
    return getattr(dp2, name)(
        **{**dict(learning_rate=0.5, l2_norm_clip=1.0, noise_multiplier=1.0), **needed, **changes}
    )


def dp2_rmsprop(**changes):
    arguments = dict(
        learning_rate=0.05, l2_norm_clip=1.5, noise_multiplier=0.7, delay=DELAY, sgd_learning_rate=0.3,
        sgd_l2_norm_clip=0.4, eps=1e-3, expected_batch_size=BATCH, noise_seed=1,
    )  # fmt: skip
    return dp2.DP2RMSprop(**{**arguments, **changes})


# Models of every kind, all with a random layer.


def layers():
    return [keras.layers.Dense(4, use_bias=False), keras.layers.Dropout(0.5), keras.layers.Dense(1)]


def functional():
    inputs = keras.Input((FEATURES,))
    outputs = inputs
    for layer in layers():
        outputs = layer(outputs)
    return inputs, outputs


def network(base):
    """A subclassed model on top of `base`."""

    class Network(base):
        def __init__(self, units=4, **kwargs):
            super().__init__(**kwargs)
            self.units = units
            self.hidden = keras.layers.Dense(units, use_bias=False)
            self.dropout = keras.layers.Dropout(0.5)
            self.out = keras.layers.Dense(1)

        def call(self, inputs, training=None):
            return self.out(self.dropout(self.hidden(inputs), training=training))

        def get_config(self):
            return {"name": self.name, "units": self.units}

    return Network


@keras.saving.register_keras_serializable("tests")
class PlainNetwork(network(keras.Model)):
    pass


@keras.saving.register_keras_serializable("tests")
class PrivateNetwork(network(dp2.DP2Model)):
    pass


MODELS = {
    "sequential": lambda: dp2.DP2Sequential([keras.Input((FEATURES,)), *layers()], name="net"),
    "sequential without input": lambda: dp2.DP2Sequential(layers(), name="net"),
    "functional": lambda: dp2.DP2Model(*functional(), name="net"),
    "made of a functional": lambda: dp2.make_private(keras.Model(*functional(), name="net")),
    "subclass": lambda: PrivateNetwork(name="net"),
    "wrapper": lambda: dp2.make_private(PlainNetwork(name="net")),
}
each_model = pytest.mark.parametrize("kind", MODELS)
each_class = pytest.mark.parametrize("kind", ["sequential", "functional", "subclass", "wrapper"])


def compiled(kind="sequential", optimizer=None, *, build=True, **arguments):
    """A model that has seen a batch, and so has weights; its optimizer has its state, or not yet."""
    model, optimizer = MODELS[kind](), optimizer or dp2_rmsprop()
    model.compile(optimizer=optimizer, loss="mse", **public_data_for(optimizer), **arguments)
    model(batch(0)[0])
    if build:  # The first step would do so, and be traced twice.
        model.optimizer.build(model.trainable_variables)
    return model


def public_data_for(optimizer):
    """What `compile` needs beside such an optimizer."""
    return {} if optimizer.public_gradients is None else {"public_data": batch(99), "public_batch_size": 3}


def batch(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    return x, x[:, :1] ** 2


def train(model, first, last):
    """Steps `first` to `last` - 1; the logs of each."""
    return [model.train_on_batch(*batch(t), return_dict=True) for t in range(first, last)]


def state(model):
    """Weights and optimizer state: what a resumed run must share."""
    values = {f"weight {i}": v.numpy() for i, v in enumerate(model.weights)}
    values.update({f"optimizer {i}": v.numpy() for i, v in enumerate(model.optimizer.variables)})
    values.update(step=model.optimizer.iterations.numpy(), phase=float(model.optimizer.phase()))
    return values


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def assert_resumes(model, resumed, step, last=8):
    """`resumed` stands where `model` stands, and goes on as if nothing had happened."""
    assert resumed.optimizer is not model.optimizer
    assert int(resumed.optimizer.iterations) == step
    assert_same(state(model), state(resumed))
    for one in (model, resumed):
        train(one, step, last)
    assert_same(state(model), state(resumed))


def run_python(code, **arguments):
    """Runs code in a process of its own."""
    code = textwrap.dedent(code).format(**{name: str(value) for name, value in arguments.items()})
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert result.returncode == 0, result.stderr
