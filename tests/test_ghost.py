"""The ghost path gives the clipped sum of a loop over single examples, in both phases.

The loop is plain Keras at a batch of one; scale, norm and clip are NumPy in float64. The
scale is random, so that a norm that leaves it out cannot pass.
"""

import functools
import time

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
from layer_cases import ALL, KERAS_3, LABELS, MADE
from zoo import ROWS, flat, normal

import dp2_keras as dp2
from dp2_keras import xla
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
    optimizer.build(model.trainable_variables)
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


@pytest.mark.parametrize("case", ["dense", "embedding", "conv2d_same_strided", "used_twice", "prelu"])
def test_blocks_change_nothing(case, monkeypatch):
    build, x = ALL[case]
    whole = [clipped_sum(private(build, x), phase, x) for phase in PHASES]
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1)
    for phase, expected_sum in zip(PHASES, whole):
        assert_close(clipped_sum(private(build, x), phase, x), expected_sum)


@pytest.mark.parametrize("size, mode", [(1, "graph"), (3, "graph"), (16, "graph"), (3, "xla")])
def test_physical_batch_size_changes_nothing(size, mode):
    build, x = ALL["conv1d"]
    in_chunks = answer_function(private(build, x, physical_batch_size=size), mode)
    at_once = answer_function(private(build, x))
    for phase in PHASES:
        assert_close(in_chunks(phase, x, LABELS)[0], at_once(phase, x, LABELS)[0])


# What one example can do.

BAD = {"huge": 1e12, "nan": np.nan, "inf": np.inf}
ROUNDING = 1 + 1e-5


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", ["dense", "dense_over_time", "conv1d", "layer_norm", "attention", "prelu"])
def test_neighbours_differ_by_at_most_the_clip_norm(case, phase):
    build, x = ALL[case]
    clip = 0.3 * clip_between(example_gradients(case))
    model = private(build, x, clips=(clip, clip))
    answer = answer_function(model)
    for index in (0, 4):
        others = np.arange(ROWS) != index
        without = answer(phase, x[others], LABELS[others])[0]
        assert np.linalg.norm(answer(phase, x, LABELS)[0] - without) <= clip * ROUNDING + 1e-6
        for name, value in BAD.items():
            poisoned, labels = x.copy(), LABELS.copy()
            poisoned[index] = value
            difference = answer(phase, poisoned, LABELS)[0] - without
            assert np.linalg.norm(difference) <= clip * ROUNDING + 1e-6
            if name == "nan":
                np.testing.assert_allclose(difference, 0, atol=1e-6)
            labels[index] = value
            assert np.linalg.norm(answer(phase, x, labels)[0] - without) <= clip * ROUNDING + 1e-6


@pytest.mark.parametrize("phase", PHASES)
def test_tiny_inputs_and_huge_errors_do_not_slip_under_the_clip(phase):
    """The square of 1e-25 is zero in float32; the product of 1e-25 and 1e25 is not."""
    build = lambda: keras.Sequential([keras.Input((2,)), layers.Dense(2, use_bias=False)])  # noqa: E731
    x, y = np.full((1, 2), 1e-25, np.float32), np.full((1, 2), 1e25, np.float32)
    total = clipped_sum(private(build, x, clips=(1e-3, 1e-3)), phase, x, y)
    assert 0 < np.linalg.norm(total) < 1e-3 * ROUNDING


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_has_a_sum_of_zero(mode):
    build, x = ALL["transformer"]
    answer = answer_function(private(build, x), mode)
    for phase in PHASES:
        values, norms = answer(phase, x[:0], LABELS[:0])
        assert not values.any() and norms.shape == (0,)


# Mutations: a norm that leaves the scale out breaks the bound, and these tests see it.


def unscaled(method):
    return lambda self, scale: method(self, None)


@pytest.mark.parametrize(
    "case, kind",
    [
        ("dense", contributions.Outer),
        ("dense_over_time", contributions.Outer),
        ("embedding", contributions.Rows),
        ("layer_norm", contributions.Direct),
        ("conv1d", contributions.Contribution),
        ("used_twice", contributions.Contribution),
        ("prelu", contributions.Contribution),
    ],
)
def test_the_unscaled_norm_in_its_place_is_found_out(case, kind, monkeypatch):
    build, x = ALL[case]
    model = private(build, x)
    for moment in model.optimizer._second_moments:
        moment.assign(tf.zeros(moment.shape))  # The scale is 1 / eps = 20.
    right = clipped_sum(model, "adaptive", x)
    monkeypatch.setattr(kind, "squared_norms", unscaled(kind.squared_norms))
    with pytest.raises(AssertionError):
        assert_close(clipped_sum(model, "adaptive", x), right)
    one = clipped_sum(model, "adaptive", x[:1])
    assert np.linalg.norm(one) > ROUNDING  # More than the clip norm, which is 1.


# Weights used elsewhere.


@dp2.declare_per_example
class Tied(layers.Layer):
    """Reads the table of an embedding that is another layer's."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, inputs):
        return tf.linalg.matvec(tf.convert_to_tensor(self.table.embeddings), inputs)


def tied():
    tokens, table = keras.Input((5,), dtype="int32"), layers.Embedding(7, 3)
    hidden = layers.GlobalAveragePooling1D()(table(tokens))
    return keras.Model(tokens, layers.Dense(2)(Tied(table)(hidden)))


def test_a_weight_read_outside_its_layer_is_refused_by_name():
    x = layer_cases.TOKENS
    with pytest.raises(ValueError, match="embeddings.*outside the layer that owns it"):
        clipped_sum(private(tied, x), "sgd", x)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_auto_takes_the_vectorized_path_for_it_and_says_why(mode):
    x = layer_cases.TOKENS
    model = private(tied, x, "auto")
    assert model.privacy_plan().method == "ghost"  # By looking alone.
    total = clipped_sum(model, "adaptive", x, mode=mode)
    assert model.privacy_plan().method == "vectorized"
    assert "outside the layer" in str(model.privacy_plan())
    assert_close(total, clipped_sum(private(tied, x, "loop"), "adaptive", x))


class LossOfWeights(keras.Sequential):
    """Adds a function of the weights to each example's loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=None):
        kernel = tf.convert_to_tensor(self.layers[0].kernel)
        return tf.reduce_mean(tf.square(y - y_pred)) * tf.reduce_sum(tf.square(kernel))


def test_a_loss_that_reads_weights_is_refused():
    model = dp2.declare_per_example(LossOfWeights)([keras.Input((5,)), layers.Dense(2)])
    with pytest.raises(ValueError, match="loss reads a weight"):
        clipped_sum(private(lambda: model, normal(ROWS, 5)), "sgd", normal(ROWS, 5))


def mixing():
    x = keras.Input((5,))
    mean = keras.ops.mean(x, axis=0, keepdims=True) if KERAS_3 else tf.reduce_mean(x, 0, keepdims=True)
    return keras.Model(x, layers.Dense(2)(x - mean))


def test_an_operation_that_mixes_examples_is_refused_by_name():
    x = normal(ROWS, 5)
    with pytest.raises(ValueError, match="mean.*not known to treat the examples"):
        private(mixing, x).privacy_plan()
    assert "mean" in private(mixing, x, "auto").privacy_plan().why


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 3)])
def test_arithmetic_must_not_broadcast_along_the_batch(shape):
    x = keras.Input((3,))
    model = keras.Model(x, layers.Dense(2)(x + tf.ones(shape)))
    plan = private(lambda: model, normal(ROWS, 3) if shape != (2, 3) else normal(2, 3), "auto").privacy_plan()
    assert plan.method == ("vectorized" if shape == (2, 3) else "ghost")


# Memory.


def shapes_in(graph):
    """The static shapes of all tensors of a graph and of the functions it calls."""
    graphs = [graph, *(function.graph for function in graph._functions.values())]
    tensors = [t for g in graphs for op in g.get_operations() for t in op.outputs]
    assert len(graphs) > 2  # Both branches of the phase.
    return {tuple(t.shape) for t in tensors if t.shape.rank}


@pytest.mark.parametrize(
    "case", "dense dense_over_time embedding conv2d_same_strided einsum lstm used_twice".split()
)
def test_no_tensor_holds_a_gradient_per_example(case, monkeypatch):
    build, x = ALL[case]
    model = private(build, x)
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1)

    def answer(x, y):
        query = model.optimizer.begin_step(model.trainable_variables)
        return model._answer(query, (x, y, None))[0].clipped_sum.values

    graph = tf.function(answer).get_concrete_function(tf.constant(x), tf.constant(LABELS)).graph
    kernels = [tuple(v.shape) for v in model.trainable_variables if len(v.shape) > 1]
    assert not {(ROWS, *kernel) for kernel in kernels} & shapes_in(graph)
    assert not {(ROWS, int(np.prod(kernel))) for kernel in kernels} & shapes_in(graph)


# Random models.

steps_of = {
    "dense": lambda size: layers.Dense(size, "tanh"),
    "conv": lambda size: layers.Conv1D(size, 2, padding="same", activation="tanh"),
    "norm": lambda size: layers.LayerNormalization(),
    "group_norm": lambda size: layers.GroupNormalization(1),
    "depthwise": lambda size: layers.DepthwiseConv1D(2, padding="same"),
    "separable": lambda size: layers.SeparableConv1D(size, 2, padding="same"),
    "einsum": lambda size: layers.EinsumDense("...x,xy->...y", size, bias_axes="y"),
    "pool": lambda size: layers.AveragePooling1D(2, padding="same"),
}


@hypothesis.settings(deadline=None, max_examples=8, derandomize=True)
@hypothesis.given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(steps_of)), st.integers(1, 4)), min_size=1, max_size=4),
    tokens=st.booleans(), length=st.integers(1, 5), phase=st.sampled_from(PHASES), clip=st.floats(0.05, 20.0),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_random_models_agree_with_the_loop(steps, tokens, length, phase, clip, seed):
    def build():
        first = [layers.Embedding(5, 3)] if tokens else []
        stack = [steps_of[name](size) for name, size in steps]
        inputs = keras.Input((length,), dtype="int32") if tokens else keras.Input((length, 3))
        return keras.Sequential([inputs, *first, *stack, layers.Flatten(), layers.Dense(2)])

    x = zoo.integers_below(5, 4, length, seed=seed) if tokens else normal(4, length, 3, seed=seed)
    plain = zoo.filled(build(), x)
    loop = zoo.slow_gradients(plain, x, LABELS, zoo.sum_of_losses("mse"))
    gradients = list(loop(flat(plain.trainable_variables), range(4)))
    model = private(build, x, clips=(clip, clip))
    assert model.privacy_plan().method == "ghost"
    assert_close(clipped_sum(model, phase, x), expected(gradients, scale(model, phase), clip))


# How a step uses it.


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
