"""The ghost path gives the clipped sum of a loop over single examples, in both phases; see `ghosts.py`."""

import time
import types

import hypothesis
import hypothesis.strategies as st
import keras
import layer_cases
import numpy as np
import pytest
import tensorflow as tf
import zoo
from ghosts import (
    PHASES,
    answer_function,
    assert_close,
    clip_between,
    clipped_sum,
    example_gradients,
    expected,
    private,
    scale,
)
from keras import layers
from layer_cases import ALL, LABELS, MADE, SEQUENCE
from zoo import ROWS, flat, normal

import dp2_keras as dp2
from dp2_keras.per_example import blocks
from dp2_keras.per_example.ghost import _in_memory

# Every layer kind.

REPRESENTATIVE = """
    dense dense_over_time dense_wide_over_time einsum embedding conv1d_causal_dilated conv2d_same_strided
    depthwise2d separable2d layer_norm group_norm used_twice transformer lstm custom
""".split()  # One of each kind; the others run in graph mode alone by default, to save time.


def unless_slow(case, *rest):
    """A parameter that only the representatives have in the default run."""
    return pytest.param(case, *rest, marks=[] if case in REPRESENTATIVE else pytest.mark.slow)


@pytest.mark.parametrize(
    "case, mode",
    [
        *((case, "graph") for case in ALL),
        *(unless_slow(case, mode) for mode in ("eager", "xla") for case in ALL if case != "conv_transpose"),
    ],
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


# TensorFlow 2.21's oneDNN kernels get a broadcast product of matrices inside a vectorized map wrong.
VECTORIZABLE = [case for case in ALL if not case.startswith(("einsum", "attention", "transformer"))]


@pytest.mark.parametrize("case", map(unless_slow, VECTORIZABLE))
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


def in_blocks_of_one(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(blocks, "HELD_ELEMENTS", 0)


@pytest.mark.parametrize("elements, fit", [(1 << 22, True), ((1 << 22) + 1, False), (1 << 30, False)])
@pytest.mark.parametrize("rows", [4, None])
def test_gradients_are_held_in_memory_where_they_fit(elements, fit, rows):
    part = types.SimpleNamespace(is_made=True, elements=lambda: elements, held=lambda: "held")
    answers = lambda parts: tf.constant(parts[0] == "held")  # noqa: E731

    @tf.function(input_signature=[tf.TensorSpec([rows], tf.bool)])
    def is_held(mask):
        return _in_memory(answers, {0: part}, mask)

    assert is_held(tf.ones([4], tf.bool)).numpy() == fit


@pytest.mark.parametrize("case", ["dense", "embedding", "conv2d_same_strided", "used_twice", "prelu"])
def test_blocks_change_nothing(case, monkeypatch):
    build, x = ALL[case]
    whole = [clipped_sum(private(build, x), phase, x) for phase in PHASES]
    in_blocks_of_one(monkeypatch)
    for phase, expected_sum in zip(PHASES, whole):
        assert_close(clipped_sum(private(build, x), phase, x), expected_sum)


@pytest.mark.parametrize("size, mode", [(1, "graph"), (3, "graph"), (16, "graph"), (3, "xla")])
def test_physical_batch_size_changes_nothing(size, mode):
    build, x = ALL["conv1d"]
    in_chunks = answer_function(private(build, x, physical_batch_size=size), mode)
    at_once = answer_function(private(build, x))
    for phase in PHASES:
        assert_close(in_chunks(phase, x, LABELS)[0], at_once(phase, x, LABELS)[0])


# Memory.


def shapes_in(graph):
    """The static shapes of all tensors of numbers in a graph and in the functions it calls."""
    graphs = [graph, *(function.graph for function in graph._functions.values())]
    tensors = [t for g in graphs for op in g.get_operations() for t in op.outputs]
    assert len(graphs) > 2  # Both branches of the phase.
    return {tuple(t.shape) for t in tensors if t.shape.rank and t.dtype.is_floating}


@pytest.mark.parametrize(
    "case",
    "dense dense_over_time embedding conv1d conv2d_same_strided conv3d depthwise2d separable2d einsum lstm "
    "used_twice tied".split(),
)
def test_no_tensor_holds_a_gradient_per_example(case, monkeypatch):
    build, x = ALL[case]
    model = private(build, x)
    in_blocks_of_one(monkeypatch)

    def answer(x, y):
        query = model.optimizer.begin_step(model.trainable_variables)
        return model._answer(query, (x, y, None))[0].clipped_sum.values

    graph = tf.function(answer).get_concrete_function(tf.constant(x), tf.constant(LABELS)).graph
    kernels = [tuple(v.shape) for v in model.trainable_variables if len(v.shape) > 1]
    assert not {(ROWS, *kernel) for kernel in kernels} & shapes_in(graph)
    assert not {(ROWS, int(np.prod(kernel))) for kernel in kernels} & shapes_in(graph)


# Random models.


def twice(x):
    dense = layers.Dense(x.shape[-1], "tanh")
    return dense(dense(x))


STEPS = {
    "dense": lambda x, size: layers.Dense(size, "tanh")(x),
    "conv": lambda x, size: layers.Conv1D(size, 2, padding="same", activation="tanh")(x),
    "norm": lambda x, size: layers.LayerNormalization()(x),
    "group_norm": lambda x, size: layers.GroupNormalization(1)(x),
    "depthwise": lambda x, size: layers.DepthwiseConv1D(2, padding="same")(x),
    "separable": lambda x, size: layers.SeparableConv1D(size, 2, padding="same")(x),
    "einsum": lambda x, size: layers.EinsumDense("...x,xy->...y", size, bias_axes="y")(x),
    "pool": lambda x, size: layers.AveragePooling1D(2, padding="same")(x),
    "attention": lambda x, size: layers.MultiHeadAttention(2, size)(x, x),
    "residual": lambda x, size: layers.Add()([x, layers.Dense(x.shape[-1], "tanh")(x)]),
    "twice": lambda x, size: twice(x),
    "custom": lambda x, size: layer_cases.Twofold()(x),
}
FAMILY = dict(
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 4)), min_size=1, max_size=4),
    tokens=st.booleans(), length=st.integers(1, 5), clip=st.floats(0.05, 20.0), seed=st.integers(0, 99),
    spread=st.floats(0.0, 4.0),
)  # fmt: skip


def random_model(steps, tokens, length):
    inputs = keras.Input((length,), dtype="int32") if tokens else keras.Input((length, 3))
    x = layers.Embedding(5, 3)(inputs) if tokens else inputs
    for name, size in steps:
        x = STEPS[name](x, size)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def check_random_model(steps, tokens, length, clip, seed, spread):
    build = lambda: random_model(steps, tokens, length)  # noqa: E731
    x = zoo.integers_below(5, 4, length, seed=seed) if tokens else normal(4, length, 3, seed=seed)
    plain = zoo.filled(build(), x)
    loop = zoo.slow_gradients(plain, x, LABELS, zoo.sum_of_losses("mse"))
    gradients = list(loop(flat(plain.trainable_variables), range(4)))
    how = dict(clips=(clip, clip), scale_seed=seed, spread=spread)
    model = private(build, x, **how)
    answers = [answer_function(model)]
    if not {"einsum", "attention"} & {name for name, _ in steps}:  # As for VECTORIZABLE.
        answers.append(answer_function(private(build, x, "vectorized", **how)))
    for phase in PHASES:
        for answer in answers:
            assert_close(answer(phase, x, LABELS[:4])[0], expected(gradients, scale(model, phase), clip))


@hypothesis.settings(deadline=None, max_examples=8, derandomize=True)
@hypothesis.given(**FAMILY)
def test_random_models_agree_with_the_loop_and_the_vectorized_path(**model):
    check_random_model(**model)


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(**FAMILY)
def test_many_random_models_agree_with_the_loop_and_the_vectorized_path(**model):
    check_random_model(**model)


# How a step uses it.


@pytest.mark.parametrize(
    "activation, loss, units",
    [("sigmoid", "binary_crossentropy", 1), ("softmax", "categorical_crossentropy", 2)],
)
def test_confident_mistakes_have_the_gradient_that_keras_gives_them(activation, loss, units):
    """The probability of a logit of -100 is 0, and its gradient is lost; Keras goes by the logit."""
    build = lambda: keras.Sequential([keras.Input((1,)), layers.Dense(units, activation)])  # noqa: E731
    x = np.repeat(np.float32([[0.1], [-5.0], [20.0], [-100.0]]), 2, axis=0)  # With either label.
    y = np.float32(np.arange(8)[:, None] % 2 == np.arange(units))
    models = [private(build, x, method, (1e9, 1e9), loss=loss) for method in ("ghost", "vectorized", "loop")]
    sums, norms = zip(*(answer_function(model)("sgd", x, y) for model in models))
    assert norms[0].max() > 10
    for total, norm in zip(sums[1:], norms[1:]):
        np.testing.assert_allclose(norms[0], norm, rtol=1e-5, atol=1e-6)
        assert_close(sums[0], total)


def returning_states():
    x = keras.Input((6, 3))
    _, hidden, _ = layers.LSTM(3, return_state=True)(x)
    return keras.Model(x, layers.Dense(2)(hidden))


def of_integers():
    return keras.Sequential([keras.Input((5,), dtype="int32"), layers.Dense(2)])


def in_float64():
    recurrent = layers.LSTM(3, dtype="float64")
    return keras.Sequential([keras.Input((6, 3)), recurrent, layers.Dense(2, dtype="float64")])


@pytest.mark.parametrize(
    "build, x, method",
    [
        (returning_states, SEQUENCE, "vectorized"),
        (of_integers, layer_cases.TOKENS, "ghost"),
        (in_float64, SEQUENCE, "ghost"),
    ],
)
def test_auto_finds_a_way(build, x, method):
    model = dp2.make_private(build())
    model.compile(dp2.DPSGD(0.1, 1.0, 1.0, expected_batch_size=ROWS), loss="mse")
    model.train_on_batch(x, LABELS)
    assert model.privacy_plan().method == method


def test_sample_weights_weigh_the_loss_before_the_clip():
    build, x = ALL["dense"]
    weights = np.linspace(0.0, 3.0, ROWS).astype(np.float32)
    for phase in PHASES:
        ours, theirs = (
            answer_function(private(build, x, method))(phase, x, LABELS, weights)[0]
            for method in ("ghost", "vectorized")
        )
        assert_close(ours, theirs)


@pytest.mark.parametrize("jit", [False, True])
def test_a_compiled_step_is_compiled_once(jit):
    """XLA compiles anew what it takes for a constant, such as the gradient of a map."""
    build, x = ALL["transformer"]
    model = private(build, x, jit_compile=jit)
    lasted = []
    for _ in range(3):
        start = time.perf_counter()
        model.train_on_batch(x, LABELS)
        lasted.append(time.perf_counter() - start)
    assert lasted[2] < lasted[0] / 3


def test_each_example_has_its_own_dropout_mask_under_the_noise_seed():
    def build():
        return keras.Sequential([keras.Input((32,)), layers.Dropout(0.5), layers.Dense(1, use_bias=False)])

    x, y = np.ones((2, 32), np.float32), np.zeros((2, 1), np.float32)
    models = [private(build, x, loss=negative, clips=(1e9, 1e9)) for _ in range(2)]
    first, again = (clipped_sum(model, "sgd", x, y) for model in models)
    assert set(np.round(-first)) == {0.0, 2.0, 4.0}
    np.testing.assert_array_equal(first, again)


def negative(y, y_pred):
    return -y_pred


def test_auto_takes_the_vectorized_path_where_an_axis_is_unknown():
    model = dp2.DP2Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile(dp2.DPSGD(0.1, 1.0, 1.0, expected_batch_size=4), loss="mse")
    spec = (tf.TensorSpec([None, None]), tf.TensorSpec([None, 1]))
    batches = lambda: iter([(np.ones((4, 3)), np.ones((4, 1)))])  # noqa: E731
    model.fit(tf.data.Dataset.from_generator(batches, output_signature=spec), dataset_size=4, verbose=0)
    assert model.privacy_plan().method == "vectorized"
    assert "unknown length" in str(model.privacy_plan())
