"""What one example can do on the ghost path, and what is refused because it could do more."""

import math

import keras
import layer_cases
import numpy as np
import pytest
import tensorflow as tf
from ghosts import (
    MODES,
    PHASES,
    answer_function,
    assert_close,
    clip_between,
    clipped_sum,
    example_gradients,
    private,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers
from layer_cases import ALL, KERAS_3, LABELS
from zoo import ROWS, integers_below, normal

import dp2_keras as dp2
from dp2_keras.per_example import blocks, contributions
from dp2_keras.per_example.sparse import SparseOuter

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


def averaged(*stack):
    return lambda: keras.Sequential([keras.Input((4, 6)), *stack, layers.GlobalAveragePooling1D()])


def weighed_tokens():
    """The mean of two rows of a table, one times 1e8, the other times -1e8."""
    tokens = keras.Input((2,), dtype="int32")
    rows = layers.Embedding(20, 6, embeddings_initializer="zeros")(tokens)
    return keras.Model(tokens, layers.GlobalAveragePooling1D()(rows * np.float32([[1e8], [-1e8]])))


def dense_twice():
    x = keras.Input((4, 6))
    dense = layers.Dense(6, use_bias=False)
    ends = [layers.Flatten()(layers.Cropping1D(crop)(x)) for crop in ((0, 3), (3, 0))]
    return keras.Model(x, layers.Add()([dense(end) for end in ends]))


HUGE = np.outer([1, -1, 1, -1], 1e8 * normal(6)).astype(np.float32)
PAIRS = np.arange(2 * ROWS, dtype=np.int32).reshape(ROWS, 2) % 20
CANCELLING = {
    "dense": (averaged(layers.Dense(6, use_bias=False)), normal(ROWS, 4, 6), HUGE),
    "conv": (averaged(layers.Conv1D(6, 1, use_bias=False)), normal(ROWS, 4, 6), HUGE),
    "separable": (averaged(layers.SeparableConv1D(6, 1, use_bias=False)), normal(ROWS, 4, 6), HUGE),
    "embedding": (weighed_tokens, PAIRS, np.int32([3, 3])),
    "dense_twice": (dense_twice, normal(ROWS, 4, 6), HUGE),
}


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("case", CANCELLING)
def test_terms_that_cancel_within_an_example_do_not_round_the_others_away(case, mode):
    """An example of huge terms and no gradient: its norm is 0, so that nothing scales it down."""
    build, x, cancelling = CANCELLING[case]
    labels = normal(ROWS + 1, 6, seed=2)
    answer = answer_function(private(build, x, clips=(1.0, 1.0)), mode)
    for phase in PHASES:
        without = answer(phase, x, labels[:ROWS])[0]
        assert np.linalg.norm(without) > 0.5
        both = answer(phase, np.concatenate([x, cancelling[None]]), labels)[0]
        assert np.linalg.norm(both - without) <= ROUNDING


@pytest.mark.parametrize("tokens", [[6, 9], [-6, -9], [2**31 - 1, 0]])
def test_an_example_with_tokens_out_of_range_is_left_out(tokens):
    """XLA reads the nearest row for them, and says nothing."""
    build, x = used_twice_table, integers_below(5, ROWS, 2)
    answer = answer_function(private(build, x), "xla")
    bad = x.copy()
    bad[3] = tokens
    for phase in PHASES:
        (total, norms), others = answer(phase, bad, LABELS), np.arange(ROWS) != 3
        assert norms[3] == 0
        np.testing.assert_allclose(norms[others], answer(phase, x, LABELS)[1][others], rtol=1e-6)
        assert_close(total, answer(phase, x[others], LABELS[others])[0])


def used_twice_table():
    tokens = keras.Input((2,), dtype="int32")
    table = layers.Embedding(5, 3)
    parts = [layers.Flatten()(part) for part in (table(tokens), layers.Dense(3)(table(tokens)))]
    return keras.Model(tokens, layers.Dense(2)(layers.Concatenate()(parts)))


@pytest.mark.parametrize("phase", PHASES)
def test_tiny_inputs_and_huge_errors_do_not_slip_under_the_clip(phase):
    """The square of 1e-25 is zero in float32; the product of 1e-25 and 1e25 is not."""
    build = lambda: keras.Sequential([keras.Input((2,)), layers.Dense(2, use_bias=False)])  # noqa: E731
    x, y = np.full((1, 2), 1e-25, np.float32), np.full((1, 2), 1e25, np.float32)
    total = clipped_sum(private(build, x, clips=(1e-3, 1e-3)), phase, x, y)
    assert 0 < np.linalg.norm(total) < 1e-3 * ROUNDING


def entries(shape, least, most):
    """Numbers of any size between powers of ten."""
    powers = st.lists(st.integers(least, most), min_size=math.prod(shape), max_size=math.prod(shape))
    return powers.map(lambda p: np.reshape(10.0 ** np.array(p), shape).astype(np.float32))


def outer_norms(kind, a, d, scale):
    rows = tf.sparse.from_dense(a) if kind is SparseOuter else tf.constant(a)
    outer = kind(rows, tf.constant(d), [a.shape[1], d.shape[1]])
    return np.sqrt(outer.squared_norms(None if scale is None else tf.constant(scale)).numpy())


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("kind", [contributions.Outer, SparseOuter])
@settings(max_examples=60, deadline=None)
@given(a=entries((2, 3), -35, 15), d=entries((2, 2), -35, 35), scale=entries((3, 2), -30, 15))
def test_a_norm_is_never_below_the_true_one(kind, is_scaled, a, d, scale):
    """Squares of float32 vanish below 1e-38, and the factors of a gradient are squared apart."""
    scale = scale if is_scaled else None
    scaled = np.float64(1.0 if scale is None else scale) * a[:, :, None] * np.float64(d[:, None])
    true, found = np.linalg.norm(scaled.reshape(2, -1), axis=1), outer_norms(kind, a, d, scale)
    assert np.all(~np.isfinite(found) | (found >= true * (1 - 1e-6)))


@pytest.mark.parametrize("kind", [contributions.Outer, SparseOuter])
@settings(max_examples=30, deadline=None)
@given(a=entries((2, 3), -3, 3), d=entries((2, 2), -3, 3), scale=entries((3, 2), -4, 3))
def test_a_norm_of_numbers_of_common_sizes_is_the_true_one(kind, a, d, scale):
    true = np.linalg.norm((np.float64(scale) * a[:, :, None] * d[:, None]).reshape(2, -1), axis=1)
    np.testing.assert_allclose(outer_norms(kind, a, d, scale), true, rtol=1e-5)


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
        ("conv1d", contributions.Direct),
        ("conv1d", contributions.Contribution),
        ("used_twice", contributions.Contribution),
        ("prelu", contributions.Contribution),
    ],
)
def test_the_unscaled_norm_in_its_place_is_found_out(case, kind, monkeypatch):
    build, x = ALL[case]
    if kind is contributions.Contribution:
        monkeypatch.setattr(blocks, "HELD_ELEMENTS", 0)
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


def one_sequence_of_the_batch(layer_class):
    def build():
        x = keras.Input((3,))
        hidden = layers.Dense(3)(x)
        return keras.Model(x, layers.Dense(2)(layer_class()([hidden, hidden])))

    return build


def without_features(*after, **arguments):
    first = layers.EinsumDense("ab,b->a", output_shape=(), **arguments)
    return lambda: keras.Sequential([keras.Input((3,)), first, *after])


MIXING = {
    "attention": one_sequence_of_the_batch(layers.Attention),
    "additive_attention": one_sequence_of_the_batch(layers.AdditiveAttention),
    "softmax": without_features(layers.Softmax()),
    "activation": without_features(activation="softmax"),
}


@pytest.mark.parametrize("case", MIXING)
def test_layers_that_take_the_batch_for_another_axis_are_refused(case):
    if not KERAS_3 and "attention" not in case:
        pytest.skip("Keras 2 has no EinsumDense without features")
    model = dp2.make_private(MIXING[case]())
    model.compile(dp2.DPSGD(0.1, 1.0, 1.0), loss="mse", method="ghost")
    with pytest.raises(ValueError, match="not known to treat the examples"):
        model.privacy_plan()


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 3)])
def test_arithmetic_must_not_broadcast_along_the_batch(shape):
    x = keras.Input((3,))
    model = keras.Model(x, layers.Dense(2)(x + tf.ones(shape)))
    plan = private(lambda: model, normal(ROWS, 3) if shape != (2, 3) else normal(2, 3), "auto").privacy_plan()
    assert plan.method == ("vectorized" if shape == (2, 3) else "ghost")
