"""Private models on the ghost path, what they answer, and what a loop over single examples says to it.

The loop is plain Keras at a batch of one; scale, norm and clip are NumPy in float64. The
scale is random, so that a norm that leaves it out cannot pass.
"""

import dataclasses
import functools

import numpy as np
import oracle
import tensorflow as tf
import zoo
from layer_cases import ALL, LABELS
from zoo import ROWS, flat

import dp2_keras as dp2
from dp2_keras import xla

EPS = 0.05
MODES = ("eager", "graph", "xla")
PHASES = ("sgd", "adaptive")


def private(
    build, x, method="ghost", clips=(1.0, 1.0), loss="mse", scale_seed=11, spread=2.0, **compile_arguments
):
    """A compiled private model whose preconditioner is random."""
    model = dp2.make_private(zoo.filled(build(), x))
    optimizer = dp2.DP2RMSprop(
        0.1, clips[1], 0.0, delay=1, sgd_l2_norm_clip=clips[0], eps=EPS, expected_batch_size=4, noise_seed=1
    )
    model.compile(optimizer, loss=loss, method=method, **compile_arguments)
    optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(scale_seed)
    for moment in optimizer._second_moments:
        moment.assign(rng.lognormal(-2.0, spread, size=moment.shape))
    return model


def scale(model, phase):
    moments = flat(model.optimizer._second_moments)
    return 1 / (np.sqrt(moments) + EPS) if phase == "adaptive" else np.ones_like(moments)


def answer_function(model, mode="graph", squared=False):
    """Maps data and a phase to the clipped sum, flat, and the norms; of gradients or of their squares."""

    def answer(*data):
        query = model.optimizer.begin_step(model.trainable_variables)
        query = dataclasses.replace(query, is_squared=tf.constant(squared))
        result, _ = model._answer(query, (*data, None)[:3])
        return result.clipped_sum.values, result.norms

    graph = lambda function: tf.function(function, autograph=False)  # noqa: E731
    compiled = {"eager": lambda function: function, "graph": graph, "xla": xla.compiled}[mode](answer)

    def run(phase, *data):
        model.optimizer.iterations.assign(PHASES.index(phase))
        values, norms = compiled(*tf.nest.map_structure(tf.constant, data))
        return flat(values), norms.numpy()

    return run


def clipped_sum(model, phase, x, y=None, mode="graph"):
    return answer_function(model, mode)(phase, x, LABELS[: len(x)] if y is None else y)[0]


@functools.cache
def example_gradients(case):
    """The gradients of all examples, by the loop."""
    build, x = ALL[case]
    plain = zoo.filled(build(), x)
    gradients = zoo.slow_gradients(plain, x, LABELS, zoo.sum_of_losses("mse"))
    return np.array(list(gradients(flat(plain.trainable_variables), range(ROWS))))


def clip_between(gradients):
    """A clip norm that some examples exceed and some do not."""
    return float(np.median(np.linalg.norm(gradients, axis=1)))


def expected(gradients, scale, clip):
    return sum(oracle.clip(scale * g, clip) for g in gradients)


def assert_close(ours, theirs, tolerance=1e-5):
    assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs)
