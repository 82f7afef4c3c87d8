"""Every kind of model takes the step that a loop over single examples would take.

The loop is plain Keras, a batch of one, then clip and update in NumPy; see `zoo.py` and
`oracle.py`. Three steps cross SGD, adaptive and SGD again.
"""

import functools

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
import zoo
from conftest import fit_in_order
from keras import layers
from zoo import KINDS, flat, take

import dp2_keras as dp2
from dp2_keras.noise import NoiseSource

KERAS_3 = hasattr(keras, "StatelessScope")
MODES = {"eager": dict(run_eagerly=True), "graph": dict(jit_compile=False), "xla": dict(jit_compile=True)}
MATRIX = """
    dense conv embedding transformer lstm two_inputs two_outputs shared_layer subclassed
""".split()  # The other kinds run in graph mode alone, to save time.
BATCH, SEED = 4, 3
BATCHES = [np.arange(0, 4), np.arange(3, 7), np.arange(6, 10)]
RATE, SGD_RATE, EPS, RHO = 0.01, 0.1, 0.05, 0.9
SGD_CLIP, CLIP = CLIPS = KINDS["dense"].clips

each_mode = pytest.mark.parametrize("mode", MODES)


def optimizer(noise=0.0, clips=CLIPS):
    return dp2.DP2RMSprop(
        RATE, clips[1], noise, delay=1, sgd_learning_rate=SGD_RATE, sgd_l2_norm_clip=clips[0], eps=EPS,
        rho=RHO, expected_batch_size=BATCH, noise_seed=SEED,
    )  # fmt: skip


def private(kind="dense", build=None, noise=0.0, loss=None, **compile_arguments):
    """A private model of a kind, compiled."""
    this = KINDS[kind]
    model = dp2.make_private(zoo.filled((build or this.build)(), this.x))
    model.compile(optimizer(noise, this.clips), loss=this.loss if loss is None else loss, **compile_arguments)
    return model


def train(model, x, y, batches=BATCHES, **arguments):
    """The weights after each `train_on_batch`."""
    path = []
    for rows in batches:
        more = {name: take(value, rows) for name, value in arguments.items()}
        model.train_on_batch(take(x, rows), take(y, rows), **more)
        path.append(flat(model.trainable_variables))
    return np.array(path)


def train_kind(kind="dense", batches=BATCHES, **arguments):
    return train(private(kind, **arguments), KINDS[kind].x, KINDS[kind].y, batches)


def slow(plain, x, y, loss, batches=BATCHES, clips=CLIPS):
    """The weights after each step of the loop over single examples."""
    plain = zoo.filled(plain, x)
    return oracle.dp2(
        zoo.slow_gradients(plain, x, y, loss), flat(plain.trainable_variables), batches, rule="rmsprop",
        s1=1, s2=1, lr=RATE, lr_sgd=SGD_RATE, clip_norm=clips[1], clip_sgd=clips[0], eps=EPS, rho=RHO,
        batch_size=BATCH,
    )[1:]  # fmt: skip


@functools.cache
def slow_kind(kind="dense"):
    this = KINDS[kind]
    return slow(this.build(), this.x, this.y, zoo.sum_of_losses(this.loss), clips=this.clips)


def assert_equal(ours, expected):
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=2e-6)


# The matrix.


@pytest.mark.parametrize(
    "kind, mode", [(kind, mode) for kind in KINDS for mode in (MODES if kind in MATRIX else ["graph"])]
)
def test_each_kind_equals_the_loop_over_single_examples(kind, mode):
    assert_equal(train_kind(kind, **MODES[mode]), slow_kind(kind))


@each_mode
@pytest.mark.parametrize("kind", ["dense", "lstm"])
def test_the_loop_method_equals_the_vectorized_one(kind, mode):
    assert_equal(train_kind(kind, method="loop", **MODES[mode]), slow_kind(kind))


@each_mode
def test_a_masked_sequence_loses_the_mean_over_its_own_steps(mode):
    def tagger():
        embedding = layers.Embedding(7, 2, mask_zero=True)
        return keras.Sequential([keras.Input((3,), dtype="int32"), embedding, layers.Dense(1)])

    def loss(labels, predictions):
        tags, real = labels
        errors = tf.reduce_mean(tf.square(tags - predictions), axis=-1)
        return tf.reduce_sum(errors * real) / tf.reduce_sum(real)

    tokens, tags = KINDS["masked"].x, zoo.normal(zoo.ROWS, 3, 1)
    model = dp2.make_private(zoo.filled(tagger(), tokens))
    model.compile(optimizer(), loss="mse", **MODES[mode])
    real = (tokens != 0).astype(np.float32)
    assert 0 < real.mean() < 1
    assert_equal(train(model, tokens, tags), slow(tagger(), tokens, (tags, real), loss))


# The batch.


@pytest.mark.parametrize(
    "size, mode",
    [
        (1, "graph"),
        (2, "graph"),
        (3, "graph"),
        (4, "graph"),
        (9, "graph"),
        (2, "eager"),
        (1, "xla"),
        (3, "xla"),
    ],
)
def test_physical_batch_size_changes_nothing(size, mode):
    assert_equal(train_kind(physical_batch_size=size, **MODES[mode]), slow_kind())


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_batch_of_one(mode):
    ours = train_kind(batches=[[2], [5]], **MODES[mode])
    this = KINDS["dense"]
    assert_equal(ours, slow(this.build(), this.x, this.y, zoo.sum_of_losses("mse"), [[2], [5]]))


@pytest.mark.parametrize("physical_batch_size", [None, 3])
@pytest.mark.parametrize("as_dataset", [False, True])
def test_a_smaller_last_batch_is_divided_by_the_expected_size(as_dataset, physical_batch_size):
    this = KINDS["dense"]
    batches = [np.arange(0, 4), np.arange(4, 8), np.arange(8, 10)]
    model = private(physical_batch_size=physical_batch_size)
    if as_dataset:
        model.fit(
            tf.data.Dataset.from_tensor_slices((this.x, this.y)).batch(BATCH), dataset_size=10, verbose=0
        )
    else:
        fit_in_order(model, this.x, this.y, batch_size=BATCH)
    expected = slow(this.build(), this.x, this.y, zoo.sum_of_losses("mse"), batches)[-1]
    assert_equal(flat(model.trainable_variables), expected)


@pytest.mark.parametrize(
    "mode, more",
    [
        ("eager", dict()),
        ("graph", dict()),
        ("xla", dict()),
        ("graph", dict(method="loop")),
        ("graph", dict(physical_batch_size=2)),
        ("xla", dict(physical_batch_size=2)),
    ],
)
def test_an_empty_batch_is_a_step_without_an_update(mode, more):
    model = private(**more, **MODES[mode])
    before = flat(model.trainable_variables)
    train(model, KINDS["dense"].x, KINDS["dense"].y, [[]])
    np.testing.assert_array_equal(flat(model.trainable_variables), before)
    assert int(model.optimizer.iterations) == 1


@each_mode
def test_an_empty_batch_with_noise_is_a_step_of_pure_noise(mode):
    model = private(noise=0.7, **MODES[mode])
    before = flat(model.trainable_variables)
    train(model, KINDS["dense"].x, KINDS["dense"].y, [[]])
    step = tf.constant(0, tf.int64)  # All variables are small, and drawn at once.
    normal = NoiseSource(SEED).normal(before.shape, step, stream=0, variable=0).numpy()
    expected = before - SGD_RATE * 0.7 * SGD_CLIP * normal / BATCH
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=1e-4, atol=1e-6)


@each_mode
def test_empty_batches_of_a_dataset_are_steps(mode):
    this, rows = KINDS["dense"], [[], BATCHES[0], [], BATCHES[1]]

    def batches():
        for some in rows:
            yield take(this.x, np.array(some, int)), take(this.y, np.array(some, int))

    shapes = tuple(tf.TensorSpec([None, *t.shape[1:]], tf.float32) for t in (this.x, this.y))
    model = private(**MODES[mode])
    data = tf.data.Dataset.from_generator(batches, output_signature=shapes)
    model.fit(data, dataset_size=zoo.ROWS, verbose=0)
    expected = slow(this.build(), this.x, this.y, zoo.sum_of_losses("mse"), rows)[-1]
    assert_equal(flat(model.trainable_variables), expected)


# The loss.


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "none"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_loss_reduction_changes_nothing(reduction, mode):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    assert_equal(train_kind(loss=loss, **MODES[mode]), slow_kind())


def weighted_mse(labels, predictions):
    y, weight = labels
    return weight[0] * tf.reduce_mean(tf.square(y - predictions))


@pytest.mark.parametrize(
    "mode, reduction",
    [("graph", "sum"), ("graph", "none"), *((mode, "sum_over_batch_size") for mode in MODES)],
)
def test_a_sample_weight_multiplies_the_loss_before_the_clip(mode, reduction):
    this, weights = KINDS["dense"], np.linspace(0.0, 3.0, zoo.ROWS).astype(np.float32)
    model = private(loss=keras.losses.MeanSquaredError(reduction=reduction), **MODES[mode])
    ours = train(model, this.x, this.y, sample_weight=weights)
    assert_equal(ours, slow(this.build(), this.x, (this.y, weights), weighted_mse))


def test_a_class_weight_is_the_sample_weight_of_its_class():
    x, labels = KINDS["dense"].x, zoo.integers_below(2, zoo.ROWS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    by_class, by_sample = private(loss=loss), private(loss=loss)
    arguments = dict(batch_size=BATCH, sampling="shuffle", shuffle=False, verbose=0)
    by_class.fit(x, labels, class_weight={0: 0.25, 1: 2.0}, **arguments)
    by_sample.fit(x, labels, sample_weight=np.array([0.25, 2.0], np.float32)[labels], **arguments)
    np.testing.assert_array_equal(flat(by_class.trainable_variables), flat(by_sample.trainable_variables))


def test_loss_weights_weigh_the_outputs_before_the_clip():
    this = KINDS["two_outputs"]
    ours = train_kind("two_outputs", loss_weights=[0.3, 2.0])
    first, second = (keras.losses.get(loss) for loss in this.loss)
    loss = lambda y, y_pred: 0.3 * first(y[0], y_pred[0]) + 2.0 * second(y[1], y_pred[1])  # noqa: E731
    assert_equal(ours, slow(this.build(), this.x, this.y, loss, clips=this.clips))


def own_loss(y, y_pred):
    return tf.reduce_mean(tf.abs(y - y_pred) ** 1.5) + 0.1 * tf.reduce_mean(tf.square(y_pred))


class OwnLoss:
    """A `compute_loss` for a model; Keras 3 passes `training` too."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=None):
        return own_loss(y, y_pred)


class OwnLossPlain(OwnLoss, zoo.Subclassed):
    pass


class OwnLossPrivate(OwnLoss, dp2.DP2Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(3, "tanh"), layers.Dense(2)

    call = zoo.Subclassed.call


@pytest.mark.parametrize(
    "build, mode",
    [(OwnLossPlain, "eager"), (OwnLossPlain, "graph"), (OwnLossPrivate, "graph"), (OwnLossPrivate, "xla")],
)
def test_a_compute_loss_of_ones_own_is_the_loss_of_each_example(build, mode):
    this = KINDS["subclassed"]
    model = dp2.make_private(zoo.filled(build(), this.x))
    model.compile(optimizer(), **MODES[mode])
    assert_equal(train(model, this.x, this.y), slow(this.build(), this.x, this.y, own_loss))


def regularized():
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, "tanh", kernel_regularizer=keras.regularizers.L2(0.5)),
         layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.25))]
    )  # fmt: skip


@keras.saving.register_keras_serializable("dp2_keras_tests")
class SubclassedRegularized(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = regularized()

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    "build, mode, method",
    [
        (regularized, "eager", "vectorized"),
        (regularized, "graph", "loop"),
        (regularized, "xla", "vectorized"),
        (SubclassedRegularized, "graph", "vectorized"),
    ],
)
def test_weight_regularisers_stand_outside_the_clip_and_the_preconditioner(build, mode, method):
    this = KINDS["dense"]
    ours = train_kind(build=build, batches=BATCHES[:2], method=method, **MODES[mode])
    plain = zoo.filled(regularized(), this.x)
    factors = np.concatenate(
        [np.full(int(np.prod(v.shape)), c) for v, c in zip(plain.trainable_variables, [0.5, 0, 0.25, 0])]
    )
    gradients = zoo.slow_gradients(plain, this.x, this.y, zoo.sum_of_losses("mse"))
    w0 = flat(plain.trainable_variables)
    g0 = sum(oracle.clip(g, SGD_CLIP) for g in gradients(w0, BATCHES[0])) / BATCH
    w1 = w0 - SGD_RATE * (g0 + 2 * factors * w0)
    scale = 1 / (np.sqrt((1 - RHO) * g0**2) + EPS)
    g1 = sum(oracle.clip(scale * g, CLIP) for g in gradients(w1, BATCHES[1])) / BATCH
    w2 = w1 - RATE * (g1 + 2 * factors * w1)
    assert_equal(ours, [w1, w2])


# The model.


def test_layers_are_frozen_and_thawed_between_compiles():
    this = KINDS["dense"]
    model, plain = private(), zoo.filled(this.build(), this.x)
    for trainable in (False, True):
        kernel = model.layers[0].kernel.numpy()
        model.layers[0].trainable = plain.layers[0].trainable = trainable
        model.compile(optimizer(), loss="mse")
        zoo.assign(model, flat(plain.trainable_variables))
        gradients = zoo.slow_gradients(plain, this.x, this.y, zoo.sum_of_losses("mse"))
        w = flat(plain.trainable_variables)
        ours = train(model, this.x, this.y, BATCHES[:1])[0]
        mean = sum(oracle.clip(g, SGD_CLIP) for g in gradients(w, BATCHES[0])) / BATCH
        assert_equal(ours, w - SGD_RATE * mean)
        assert np.array_equal(model.layers[0].kernel.numpy(), kernel) is not trainable
        zoo.assign(plain, ours)


def test_an_optimizer_refuses_variables_it_was_not_built_with():
    model = private()
    model.layers[0].trainable = False
    optimizer_of_few = optimizer()
    model.compile(optimizer_of_few, loss="mse")
    train(model, KINDS["dense"].x, KINDS["dense"].y, BATCHES[:1])
    model.layers[0].trainable = True
    model.compile(optimizer_of_few, loss="mse")
    with pytest.raises(ValueError, match="[Uu]nknown variable"):
        train(model, KINDS["dense"].x, KINDS["dense"].y, BATCHES[:1])


@pytest.fixture
def mixed_bfloat16():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    yield
    keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize(
    "kind, mode", [("dense", "eager"), ("dense", "graph"), ("dense", "xla"), ("transformer", "graph")]
)
def test_mixed_bfloat16_keeps_weights_and_state_in_float32(mixed_bfloat16, kind, mode):
    model = private(kind, **MODES[mode])
    assert model.layers[-1].compute_dtype == "bfloat16"
    ours = train(model, KINDS[kind].x, KINDS[kind].y)
    state = [*model.trainable_variables, *model.optimizer.variables]
    assert {tf.as_dtype(v.dtype).name for v in state} <= {"float32", "int32", "int64"}
    keras.mixed_precision.set_global_policy("float32")
    np.testing.assert_allclose(ours, slow_kind(kind), atol=0.03)
    assert np.abs(ours - slow_kind(kind)).max() > 1e-5  # It did compute in bfloat16.


@pytest.mark.parametrize("method", ["vectorized", "loop"])
def test_recurrent_dropout_trains(method):
    def build():
        return keras.Sequential(
            [keras.Input((3, 2)), layers.LSTM(3, dropout=0.5, recurrent_dropout=0.5), layers.Dense(2)]
        )

    ours = train_kind("lstm", build=build, method=method, batches=BATCHES[:1])
    assert np.isfinite(ours).all()
    assert np.abs(ours[0] - slow_kind("lstm")[0]).max() > 1e-3


# How Keras runs the step.


@pytest.mark.parametrize(
    "arguments",
    [dict(run_eagerly=True), dict(jit_compile=True), dict(jit_compile="auto" if KERAS_3 else None),
     dict(steps_per_execution=2), dict(physical_batch_size=3), dict(method="loop"),
     dict(steps_per_execution=2, physical_batch_size=3, jit_compile=True)],
    ids=str,
)  # fmt: skip
def test_a_seeded_run_with_noise_is_the_same_however_it_is_executed(arguments):
    assert_equal(seeded_run(**arguments), seeded_run(jit_compile=False))


@functools.cache
def seeded_run(**arguments):
    """The weights after two epochs of three batches, the last of them smaller."""
    model, this = private(noise=0.7, **arguments), KINDS["dense"]
    fit_in_order(model, this.x, this.y, batch_size=BATCH, epochs=2)
    assert int(model.optimizer.iterations) == 6
    return flat(model.trainable_variables)


# Recurrent layers.


def unknown_length():
    return keras.Sequential([keras.Input((None, 2)), layers.LSTM(3), layers.Dense(2)])


class SubclassedUnknownLength(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = unknown_length()

    def call(self, x):
        return self.inner(x)


def sequences_of_unknown_length():
    this = KINDS["lstm"]
    shapes = (tf.TensorSpec([None, None, 2]), tf.TensorSpec([None, 2]))
    rows = lambda: ((take(this.x, r), take(this.y, r)) for r in BATCHES)  # noqa: E731
    return tf.data.Dataset.from_generator(rows, output_signature=shapes)


@pytest.mark.parametrize("build", [unknown_length, SubclassedUnknownLength])
def test_sequences_of_unknown_length_are_refused_by_the_vectorized_method(build):
    model = private("lstm", build=build)
    with pytest.raises(ValueError, match='method="loop"'):
        model.fit(sequences_of_unknown_length(), dataset_size=zoo.ROWS, verbose=0)


def test_sequences_of_unknown_length_are_trained_by_the_loop():
    model = private("lstm", build=unknown_length, method="loop")
    model.fit(sequences_of_unknown_length(), dataset_size=sum(map(len, BATCHES)), verbose=0)
    assert_equal(flat(model.trainable_variables), slow_kind("lstm")[-1])
