"""jax-privacy, by a step compiled whole: python contend_jax_privacy.py WORKLOAD CONTENDER

DP-SGD of `clipped_grad` and `gaussian_privatizer`; in `jax-privacy-scaled` each example's gradient is
multiplied by a preconditioner's scale before it is clipped, as in DP2's adaptive phase.

In the settings that favour it: noise of the "rbg" generator, parameters updated in place, and examples
clipped one after another (`microbatch_size=1`), which on a CPU is up to 40 times as fast as all of them
at once; the convolutions are the exception.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
import turns
import workloads

LEARNING_RATE = 0.01


def build(workload):
    """The shapes of a workload's parameters, and the loss of one example: f(parameters, x, y)."""
    shapes, outputs, loss = _MODELS[workload.model](workload)
    return shapes, lambda parameters, x, y: jnp.mean(loss(outputs(parameters, x), y))


def dense(parameters, name, x):
    """A Dense layer."""
    return x @ parameters[name + "/kernel"] + parameters[name + "/bias"]


def dense_shapes(name, inputs, units):
    """The shapes of a Dense layer's parameters."""
    return {name + "/kernel": (inputs, units), name + "/bias": (units,)}


def conv(parameters, name, x, strides, padding):
    """A 2-D convolution and relu of one image, and the largest of each 2 x 2 of it."""
    x = jax.lax.conv_general_dilated(
        x[None],
        parameters[name + "/kernel"],
        (strides, strides),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = jax.nn.relu(x + parameters[name + "/bias"])
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")[0]


def attention(parameters, x):
    """Self-attention of four heads."""
    q, k, v = (dense(parameters, name, x).reshape(len(x), 4, 16) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / 4.0)
    return dense(parameters, "out", jnp.einsum("hqk,khd->qhd", weights, v).reshape(len(x), 64))


def normalized(parameters, name, x):
    """Layer normalization."""
    return jax.nn.standardize(x, epsilon=1e-3) * parameters[name + "/gamma"] + parameters[name + "/beta"]


def _squared_error(outputs, labels):
    return (outputs - labels) ** 2


def _linear(workload):
    one = workload.size == 1
    loss = optax.sigmoid_binary_cross_entropy if one else optax.softmax_cross_entropy_with_integer_labels
    shapes = dense_shapes("dense", workloads.WORDS, workload.size)
    return shapes, lambda parameters, x: dense(parameters, "dense", x), loss


def _factors(workload):
    shapes = {"users": (workloads.USERS, workloads.FACTORS), "items": (workloads.ITEMS, workloads.FACTORS)}

    def outputs(parameters, x):
        return (parameters["users"][x[0]] * parameters["items"][x[1]]).sum(-1)

    return shapes, outputs, _squared_error


def _cnn(workload):
    shapes = {
        "conv1/kernel": (8, 8, 1, 16),
        "conv1/bias": (16,),
        "conv2/kernel": (4, 4, 16, 32),
        "conv2/bias": (32,),
    }
    shapes |= dense_shapes("hidden", 512, 32) | dense_shapes("logits", 32, 10)

    def outputs(parameters, x):
        x = conv(parameters, "conv1", x, 2, "SAME")
        x = conv(parameters, "conv2", x, 2, "VALID")
        return dense(parameters, "logits", jax.nn.relu(dense(parameters, "hidden", x.ravel())))

    return shapes, outputs, optax.softmax_cross_entropy_with_integer_labels


def _transformer(workload):
    shapes = {"embedding": (workloads.TOKENS, 64)}
    shapes |= {f"norm{i}/{name}": (64,) for i in (1, 2) for name in ("gamma", "beta")}
    for name, inputs, units in ("q", 64, 64), ("k", 64, 64), ("v", 64, 64), ("out", 64, 64), ("logit", 64, 1):
        shapes |= dense_shapes(name, inputs, units)
    shapes |= dense_shapes("wide", 64, 256) | dense_shapes("narrow", 256, 64)

    def outputs(parameters, tokens):
        x = parameters["embedding"][tokens]
        x = normalized(parameters, "norm1", x + attention(parameters, x))
        hidden = dense(parameters, "narrow", jax.nn.relu(dense(parameters, "wide", x)))
        return dense(parameters, "logit", normalized(parameters, "norm2", x + hidden).mean(0))

    return shapes, outputs, optax.sigmoid_binary_cross_entropy


def _dense(workload):
    shapes = dense_shapes("dense", workload.size, workload.size)
    return shapes, lambda parameters, x: dense(parameters, "dense", x), _squared_error


_MODELS = {"linear": _linear, "factors": _factors, "cnn": _cnn, "transformer": _transformer, "dense": _dense}


def initial(shapes):
    """Ones for a norm's gamma, zeros for what is added, and small numbers for the rest."""
    rng = np.random.default_rng(0)
    filled = {"gamma": np.ones, "bias": np.zeros, "beta": np.zeros}
    make = {
        name: filled.get(name.split("/")[-1], lambda shape: rng.normal(size=shape) * 0.05) for name in shapes
    }
    return {name: jnp.asarray(make[name](shape), jnp.float32) for name, shape in shapes.items()}


def make_step(workload, loss, privatizer, scaled):
    """A step of DP-SGD, compiled: new parameters and new state of the noise."""

    def step(parameters, noise_state, scale, x, y):
        gradient = jax_privacy.clipped_grad(
            loss,
            l2_clip_norm=1.0,
            batch_argnums=(1, 2),
            keep_batch_dim=False,
            normalize_by=workload.batch_size,
            pre_clipping_transform=lambda g: jax.tree.map(jnp.multiply, g, scale) if scaled else g,
            microbatch_size=None if workload.model == "cnn" else 1,
        )
        noisy, noise_state = privatizer.update(gradient(parameters, x, y), noise_state)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, parameters, noisy), noise_state

    return jax.jit(step, donate_argnums=0)


def main(workload, name):
    x, y = workload.data()
    shapes, loss = build(workload)
    parameters = initial(shapes)
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=1.0 / workload.batch_size, prng_key=jax.random.key(0, impl="rbg")
    )
    noise_state = privatizer.init(parameters)
    scale = jax.tree.map(jnp.ones_like, parameters)
    private = make_step(workload, loss, privatizer, name.endswith("scaled"))
    rng = np.random.default_rng(1)

    def step(i):
        nonlocal parameters, noise_state
        rows = rng.integers(0, len(y), workload.batch_size)
        batch = jax.tree.map(lambda part: part[rows], (x, y))
        parameters, noise_state = jax.block_until_ready(private(parameters, noise_state, scale, *batch))

    turns.serve(step)


if __name__ == "__main__":
    main(workloads.WORKLOADS[sys.argv[1]], sys.argv[2])
