"""The ghost path gives the clipped sum of a loop over single examples, in both phases.

The loop is plain Keras at a batch of one; scale, norm and clip are NumPy in float64. The
scale is random, so that a norm that leaves it out cannot pass.
"""

import functools
import sys

import hypothesis
import hypothesis.strategies as st
import keras
import layer_cases
import numpy as np
import oracle
import pytest
import tensorflow as tf
import zoo
from keras import layers
from layer_cases import ALL, FORMULA, KERAS_3, LABELS, MADE, MODELS
from zoo import ROWS, flat, normal, take

import dp2_keras as dp2
from dp2_keras.per_example import blocks, contributions

EPS = 0.05
MODES = ("eager", "graph", "xla")
PHASES = ("sgd", "adaptive")


def private(build, x, method="ghost", clips=(1.0, 1.0), loss="mse", **compile_arguments):
    """A compiled private model whose preconditioner is random, and its scale, flat."""
    model = dp2.make_private(zoo.filled(build(), x))
    optimizer = dp2.DP2RMSprop(
        0.1, clips[1], 0.0, delay=1, sgd_l2_norm_clip=clips[0], eps=EPS, expected_batch_size=4, noise_seed=1
    )
    model.compile(optimizer, loss=loss, method=method, **compile_arguments)
    rng = np.random.default_rng(11)
    for moment in optimizer._second_moments:
        moment.assign(rng.lognormal(-2.0, 2.0, size=moment.shape))
    return model


def scale(model, phase):
    moments = flat(model.optimizer._second_moments)
    return 1 / (np.sqrt(moments) + EPS) if phase == "adaptive" else np.ones_like(moments)


def answer_function(model, mode="graph"):
    """Maps data and a phase to the clipped sum, flat, and the norms."""

    def answer(*data):
        query = model.optimizer.begin_step(model.trainable_variables)
        result, _ = model._answer(query, (*data, None)[:3])
        return result.clipped_sum.values, result.norms

    compiled = answer if mode == "eager" else tf.function(answer, jit_compile=mode == "xla", autograph=False)

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


# Every layer kind.

XLA_CASES = """
    dense dense_over_time dense_wide_over_time einsum embedding conv1d_causal_dilated conv2d_same_strided
    depthwise2d separable2d layer_norm group_norm used_twice transformer lstm custom
""".split()  # One of each kind: XLA takes seconds to compile a model.


@pytest.mark.parametrize(
    "case, mode", [(case, mode) for case in ALL for mode in MODES if mode != "xla" or case in XLA_CASES]
)
def test_the_clipped_sum_is_that_of_the_loop_in_both_phases(case, mode):
    build, x = ALL[case]
    gradients = example_gradients(case)
    scales = scale(private(build, x), "adaptive")
    clips = (clip_between(gradients), clip_between(scales * gradients))
    model = private(build, x, clips=clips)
    answer = answer_function(model, mode)
    for phase, clip in zip(PHASES, clips):
        values, norms = answer(phase, x, LABELS)
        scaled = scale(model, phase) * gradients
        np.testing.assert_allclose(norms, np.linalg.norm(scaled, axis=1), rtol=1e-5)
        assert_close(values, expected(gradients, scale(model, phase), clip))


@pytest.mark.parametrize("case", ALL)
def test_the_clipped_sum_is_that_of_the_vectorized_path(case):
    build, x = ALL[case]
    clip = clip_between(example_gradients(case))
    for phase in PHASES:
        ours, theirs = (
            clipped_sum(private(build, x, method, (clip, clip)), phase, x)
            for method in ("ghost", "vectorized")
        )
        assert_close(ours, theirs)


@pytest.mark.parametrize("case", ALL)
def test_the_plan_says_how_each_layer_is_done(case):
    build, x = ALL[case]
    plan = private(build, x, "auto").privacy_plan()
    assert plan.method == "ghost"
    made = [layer.kind for layer in plan.layers if layer.how == "made"]
    assert bool(made) == (case in MADE), plan
    assert all(kind in str(plan) for kind in made)
