"""Methods with public data follow their NumPy oracles, and keep the sensitivity and the noise they state."""

import json
import math

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
import zoo
from conftest import flat_weights, logistic_model, train
from scipy import stats
from test_privatizer import ROUNDING, Wide

import dp2_keras as dp2
from dp2_keras.noise import NoiseSource
from dp2_keras.privatizer import ClippedSum
from dp2_keras.public_data import PublicGradients

FEATURES, BATCH, DRAWN, STEPS = 5, 4, 3, 12
RNG = np.random.default_rng(0)
SPREAD = np.array([0.1, 0.3, 1.0, 2.0, 4.0])
X = (RNG.normal(size=(BATCH * STEPS, FEATURES)) * SPREAD).astype(np.float32)
Y = (RNG.random(BATCH * STEPS) < 0.5).astype(np.float32)
PUBLIC_X = (RNG.normal(size=(20, FEATURES)) * SPREAD).astype(np.float32)
PUBLIC_Y = (RNG.random(20) < 0.5).astype(np.float32)
BATCHES = [np.arange(BATCH * t, BATCH * (t + 1)) for t in range(STEPS)]
COMMON = dict(expected_batch_size=BATCH, noise_seed=3)
PUBLIC = dict(public_data=(PUBLIC_X, PUBLIC_Y), public_batch_size=DRAWN)
START = np.zeros(FEATURES + 1)

each_sigma = pytest.mark.parametrize("sigma", [0.0, 0.7])


def at(step):
    return tf.constant(step, tf.int64)


def standard_normals(stream=0):
    """What the seeded optimizers draw, step by step."""
    source = NoiseSource(COMMON["noise_seed"])
    draw = lambda t: source.normal([FEATURES + 1], at(t), stream=stream, variable=0)  # noqa: E731
    return [draw(t).numpy() for t in range(STEPS)]


def public_rows(step):
    """The public rows that they draw."""
    words = NoiseSource(COMMON["noise_seed"]).bits([DRAWN], at(step), stream=3).numpy()
    return words.astype(np.int64) % len(PUBLIC_X)


def public_gradients(w, step):
    return oracle.logistic_gradients(PUBLIC_X, PUBLIC_Y)(w, public_rows(step))


def public_mean(w, step):
    return np.mean(public_gradients(w, step), axis=0)


def path_of(optimizer, **arguments):
    return train(logistic_model(FEATURES, optimizer, **arguments), X, Y, BATCHES)


def expected_path(method, *public, **arguments):
    gradients = oracle.logistic_gradients(X, Y)
    return method(gradients, *public, START, BATCHES, batch_size=BATCH, **arguments)


# AdaDPS.

ADADPS = {"rmsprop": (dp2.AdaDPSRMSprop, {"rho": 0.8}), "adagrad": (dp2.AdaDPSAdagrad, {})}


@each_sigma
@pytest.mark.parametrize("method", ["ghost", "vectorized", "loop"])
@pytest.mark.parametrize("rule", ADADPS)
def test_adadps_equals_the_oracle(rule, method, sigma):
    make, rho = ADADPS[rule]
    ours = path_of(make(0.05, 1.5, sigma, eps=1e-2, **rho, **COMMON), method=method, **PUBLIC)
    expected = expected_path(
        oracle.adadps, public_mean, rule=rule, lr=0.05, clip_norm=1.5, eps=1e-2, sigma=sigma,
        noise=standard_normals(), **rho,
    )  # fmt: skip
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


MOMENTS = [np.float32(SPREAD[:, None] ** 2), np.float32([0.25])]


@keras.saving.register_keras_serializable("tests")
def moments_of(variable):
    """Public statistics of each variable of logistic regression."""
    return MOMENTS[0] if tuple(variable.shape) == (FEATURES, 1) else MOMENTS[1]


@each_sigma
@pytest.mark.parametrize("given", [MOMENTS, [m.tolist() for m in MOMENTS], moments_of])
@pytest.mark.parametrize("rule", ADADPS)
def test_adadps_of_statistics_equals_the_oracle(rule, given, sigma):
    make, _ = ADADPS[rule]
    optimizer = make(0.05, 1.5, sigma, eps=1e-2, public_second_moments=given, **COMMON)
    fixed = np.concatenate([m.ravel() for m in MOMENTS])
    expected = expected_path(  # RMSprop's v, of decay 0, is the last square: here always the same.
        oracle.adadps, lambda w, t: np.sqrt(fixed), rule="rmsprop", rho=0.0, lr=0.05, clip_norm=1.5,
        eps=1e-2, sigma=sigma, noise=standard_normals(),
    )  # fmt: skip
    np.testing.assert_allclose(path_of(optimizer), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(optimizer._second_moments[0].numpy(), MOMENTS[0])


@pytest.mark.parametrize("given", [[m.tolist() for m in MOMENTS], moments_of])
def test_statistics_are_in_the_config_and_in_files(given, tmp_path):
    optimizer = dp2.AdaDPSRMSprop(0.05, 1.5, 0.5, public_second_moments=given, **COMMON)
    assert optimizer.public_second_moments == given
    config = json.loads(json.dumps(optimizer.get_config()))
    assert dp2.AdaDPSRMSprop.from_config(config).public_second_moments == given
    model = logistic_model(FEATURES, optimizer)
    model.train_on_batch(X[:4], Y[:4])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        one.train_on_batch(X[4:8], Y[4:8])
    np.testing.assert_array_equal(flat_weights(loaded), flat_weights(model))
    with pytest.raises(AttributeError, match="`public_second_moments` is fixed"):
        optimizer.public_second_moments = None


@pytest.mark.parametrize("module, name", [("os", "system"), ("builtins", "exec"), (__name__, "path_of")])
def test_a_file_cannot_name_a_function_that_is_not_registered(module, name):
    config = dp2.AdaDPSRMSprop(0.05, 1.5, 0.5, **COMMON).get_config()
    for function in (
        {"module": module, "class_name": "function", "config": name, "registered_name": name},
        {"module": module, "class_name": name, "config": {}, "registered_name": name},
    ):
        with pytest.raises((ValueError, TypeError), match="must be registered|not allowed|ould not|nable to"):
            dp2.AdaDPSRMSprop.from_config({**config, "public_second_moments": function})


@pytest.mark.parametrize(
    "given, message",
    [
        (1.0, "`public_second_moments` must be a list of arrays, or a function"),
        ([[[1.0]] * FEATURES, [-1.0]], "must be finite numbers of at least 0"),
        ([[[1.0]] * FEATURES, [np.nan]], "must be finite numbers of at least 0"),
        ([[[1.0]] * FEATURES], "must have an array per trainable variable"),
        ([[1.0] * FEATURES, [1.0]], r"Received: shapes \[\(5,\), \(1,\)\] for variables of shapes"),
        (lambda variable: -np.ones(variable.shape), "must be finite numbers of at least 0"),
        (lambda variable: 1.0, "must have an array per trainable variable"),
    ],
)
def test_statistics_must_fit(given, message):
    with pytest.raises(ValueError, match=message):
        logistic_model(FEATURES, dp2.AdaDPSAdagrad(0.05, 1.5, 0.5, public_second_moments=given))


# PDA-DPMD.


def cosine(total_steps):
    return lambda t: math.cos(math.pi / 2 * min(t / total_steps, 1))


@each_sigma
@pytest.mark.parametrize("arguments, alpha", [
    ({"total_steps": STEPS}, cosine(STEPS)),
    ({"total_steps": 5}, cosine(5)),  # Public data alone from then on.
    ({"alpha": 0.3}, lambda t: 0.3),
    ({"alpha": 0}, lambda t: 0.0),
    ({"alpha": 1}, lambda t: 1.0),
])  # fmt: skip
def test_pda_dpmd_equals_the_oracle(arguments, alpha, sigma):
    ours = path_of(dp2.PDADPMD(0.1, 0.8, sigma, **arguments, **COMMON), **PUBLIC)
    expected = expected_path(
        oracle.pda_dpmd, public_mean, lr=0.1, clip_norm=0.8, alpha=alpha, sigma=sigma,
        noise=standard_normals(),
    )  # fmt: skip
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "Either `total_steps` or `alpha` must be given.* Received: total_steps=None, alpha=None"),
        ({"total_steps": 3, "alpha": 0.5}, "and not both. Received: total_steps=3, alpha=0.5"),
        ({"total_steps": 0}, "`total_steps` must be a positive integer. Received: total_steps=0"),
        ({"alpha": 1.5}, "`alpha` must be at least 0 and at most 1. Received: alpha=1.5"),
        ({"alpha": np.nan}, "`alpha` must be"),
    ],
)
def test_pda_dpmd_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        dp2.PDADPMD(0.1, 0.8, 1.0, **arguments)


# Noisy AdaGrad in a public subspace.


def subspace(sigma=1.5, **changes):
    return dp2.DPAdagradPublicSubspace(0.05, 1.5, sigma, **{**dict(subspace_size=2, eps=0.1), **changes})


@each_sigma
@pytest.mark.parametrize("method", ["ghost", "vectorized", "loop"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_public_subspace_equals_the_oracle(size, method, sigma):
    ours = path_of(subspace(sigma, subspace_size=size, **COMMON), method=method, **PUBLIC)
    noise = list(zip(standard_normals(0), standard_normals(2)))
    expected = expected_path(
        oracle.public_subspace, public_gradients, k=size, lr=0.05, clip_norm=1.5, eps=0.1, sigma=sigma,
        noise=noise,
    )  # fmt: skip
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [
    {"run_eagerly": True}, {"jit_compile": True}, {"physical_batch_size": 3},
    {"physical_batch_size": 3, "jit_compile": True},
])  # fmt: skip
def test_the_public_subspace_eagerly_by_xla_and_in_chunks(mode):
    paths = [path_of(subspace(**COMMON), **PUBLIC, **kwargs) for kwargs in ({}, mode)]
    np.testing.assert_allclose(*paths, rtol=1e-5, atol=1e-5)


def test_a_network_of_several_variables_has_one_subspace():
    kind = zoo.KINDS["lstm"]
    model = zoo.filled(dp2.make_private(kind.build()), kind.x)
    optimizer = dp2.DPAdagradPublicSubspace(0.1, np.inf, 0.0, subspace_size=3, expected_batch_size=4)
    model.compile(optimizer, kind.loss, public_data=(kind.x, kind.y))
    plain = zoo.filled(kind.build(), kind.x)
    slow = zoo.slow_gradients(plain, kind.x, kind.y, zoo.sum_of_losses(kind.loss))
    rows = np.array(list(slow(zoo.flat(plain.trainable_variables), range(zoo.ROWS))))
    few = slice(0, 4)
    model.train_on_batch(zoo.take(kind.x, few), zoo.take(kind.y, few))
    expected = oracle.top_projection(rows, 3) @ np.mean(rows[few] ** 2, axis=0)
    np.testing.assert_allclose(zoo.flat(optimizer._second_moments), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [0, 1.5, DRAWN + 1])
def test_the_subspace_has_no_more_dimensions_than_there_are_gradients(size):
    with pytest.raises(ValueError, match=f"`subspace_size`.* must be .* Received: subspace_size={size}"):
        logistic_model(FEATURES, subspace(subspace_size=size, **COMMON), **PUBLIC).train_on_batch(
            X[:2], Y[:2]
        )


class Seen(dp2.DPAdagradPublicSubspace):
    """Shows what is released."""

    def _directions(self, variables, squares, gradients):
        object.__setattr__(self, "seen", [squares[0].numpy(), gradients[0].numpy()])
        return super()._directions(variables, squares, gradients)


def test_both_releases_have_the_stated_noise_and_share_none_of_it():
    model = dp2.DP2Sequential([keras.Input((1,)), Wide()])
    optimizer = Seen(1.0, 3.0, 1.5, subspace_size=1, expected_batch_size=4, noise_seed=7)
    ones = (np.ones((3, 1)), np.ones((3, 1)))
    model.compile(optimizer, "mse", public_data=ones, run_eagerly=True)
    releases = []
    for _ in range(2):
        model.train_on_batch(*ones)
        for noise, sensitivity in zip(optimizer.seen, (9.0, 3.0)):
            stated = 1.5 * sensitivity / 4
            assert stats.kstest(noise, "norm", args=(0, stated)).pvalue > 1e-3
            for wrong in (2 / 3, 3 / 2):
                assert stats.kstest(noise, "norm", args=(0, wrong * stated)).pvalue < 1e-9
        releases += optimizer.seen
    assert np.max(np.abs(np.corrcoef(releases) - np.eye(4))) < 5 / np.sqrt(20_000)


# Sensitivity, noise, and the guard.

MAKES = {
    "adadps": lambda **k: dp2.AdaDPSRMSprop(1.0, 2.0, 1.5, eps=1e-3, **k),
    "adadps adagrad": lambda **k: dp2.AdaDPSAdagrad(1.0, 2.0, 1.5, eps=1e-3, **k),
    "pda": lambda **k: dp2.PDADPMD(1.0, 2.0, 1.5, alpha=1.0, **k),
    "subspace": lambda **k: dp2.DPAdagradPublicSubspace(1.0, 2.0, 1.5, subspace_size=2, eps=1.0, **k),
}
# Of the releases, as functions of C, where there is more than one.
SENSITIVITIES = {"subspace": [lambda c: c**2, lambda c: c]}
each_method = pytest.mark.parametrize("name", MAKES)


def sums_of(model):
    """Maps a batch to the sums that the coming step would add noise to, one release after another."""

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, n]) for n in (FEATURES, 1)])
    def answer(x, y):
        public = model._public_gradients(model.trainable_variables, (x, y, None))
        query = model.optimizer.begin_step(model.trainable_variables, public)
        parts = model._answer(query, (x, y, None))[0].clipped_sum.parts()
        return [tf.concat([tf.reshape(v, [-1]) for v in part.values], axis=0) for part in parts]

    return lambda x, y: [value.numpy() for value in answer(x, y)]


@each_method
@pytest.mark.parametrize("size, step", [(1e-3, 1), (1.0, 0), (1.0, 4), (1e3, 1)])
def test_neighbouring_data_sets_whatever_the_public_data(name, size, step):
    x, y = 50 * X[:8], Y[:8, None]
    public = dict(public_data=(size * PUBLIC_X, PUBLIC_Y[:, None]), public_batch_size=DRAWN)
    model = logistic_model(FEATURES, MAKES[name](expected_batch_size=8, noise_seed=1), **public)
    for _ in range(step):
        model.train_on_batch(x, y)
    sums, bounds = sums_of(model), [part(2.0) for part in SENSITIVITIES.get(name, [lambda c: c])]
    changes = []
    for i in range(8):
        others = np.arange(8) != i
        without = sums(x[others], y[others])
        changes.append([np.linalg.norm(a - b) for a, b in zip(sums(x, y), without)])
        broken = x.copy()
        broken[i] = np.nan
        for total, expected in zip(sums(broken, y), without):
            np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)
    largest = np.max(changes, axis=0)
    assert len(largest) == len(bounds)
    assert np.all(largest <= np.array(bounds) * ROUNDING) and np.all(largest > 0.01 * np.array(bounds))


@pytest.mark.parametrize("jit", [False, True])
@each_method
def test_noise_has_exactly_the_stated_deviation(name, jit):
    model = dp2.DP2Sequential([keras.Input((1,)), Wide()])
    public = (np.ones((3, 1)), np.ones((3, 1)))
    model.compile(
        MAKES[name](expected_batch_size=4, noise_seed=7), "mse", jit_compile=jit, public_data=public
    )
    before = np.zeros(20_000)
    for _ in range(2):
        model.train_on_batch(np.ones((3, 1)), np.ones((3, 1)))
        after = model.trainable_variables[0].numpy()
        stated, noise, before = 1.5 * 2.0 / 4, before - after, after
        assert stats.kstest(noise, "norm", args=(0, stated)).pvalue > 1e-3
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(noise, "norm", args=(0, wrong * stated)).pvalue < 1e-9


@each_method
def test_nothing_but_the_answer_to_the_open_query_moves_the_weights(name):
    model = logistic_model(FEATURES, MAKES[name](expected_batch_size=2), **PUBLIC)
    optimizer, variables = model.optimizer, model.trainable_variables
    public = model._public_gradients(variables, (X[:2], Y[:2], None))
    stale = optimizer.begin_step(variables, public)
    query = optimizer.begin_step(variables, public)
    before = flat_weights(model)
    for wrong in (ClippedSum(stale, stale.zeros()), public, query.zeros(), ClippedSum(None, query.zeros())):
        with pytest.raises(dp2.NonPrivateUpdateError, match="takes the ClippedSum"):
            optimizer.finish_step(wrong)
    np.testing.assert_array_equal(flat_weights(model), before)
    optimizer.finish_step(ClippedSum(query, query.zeros()))
    with pytest.raises(dp2.NonPrivateUpdateError):
        optimizer.finish_step(ClippedSum(query, query.zeros()))


def test_a_step_that_is_begun_changes_nothing():
    model = logistic_model(FEATURES, MAKES["adadps"](expected_batch_size=2), **PUBLIC)
    public = PublicGradients([tf.ones([FEATURES, 1]), tf.ones([1])])
    model.optimizer.begin_step(model.trainable_variables, public)
    assert not np.any(zoo.flat(model.optimizer._second_moments))


@each_method
def test_releases_are_priced_as_many_as_they_are(name):
    optimizer = MAKES[name]()
    releases = len(SENSITIVITIES.get(name, [None]))
    assert optimizer.mechanism().noise_multipliers == (1.5,) * releases
    assert optimizer.dp_event().noise_multiplier == pytest.approx(1.5 / math.sqrt(releases))
