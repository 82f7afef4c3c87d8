"""Every optimizer follows the NumPy oracle and the authors' own code, step by step."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
from conftest import fit_in_order, flat_weights, logistic_model, train

import dp2_keras as dp2
from dp2_keras.noise import NoiseSource

FEATURES, BATCH = 5, 4
NO_NOISE = dict(noise_multiplier=0.0, expected_batch_size=BATCH)


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, FEATURES)) * np.array([0.1, 0.3, 1.0, 2.0, 4.0])
    y = (rng.random(160) < 0.5).astype(np.float32)
    return x.astype(np.float32), y


def batches(steps):
    return [np.arange(BATCH * t, BATCH * (t + 1)) for t in range(steps)]


DP2 = {"rmsprop": dp2.DP2RMSprop, "adagrad": dp2.DP2Adagrad, "yogi": dp2.DP2Yogi}


def rho_of(rule):
    return {} if rule == "adagrad" else {"rho": 0.8}


@pytest.mark.parametrize("rule", DP2)
@pytest.mark.parametrize("s1, s2", [(3, 3), (2, 4), (4, 2), (1, 1)])
def test_dp2_without_noise_equals_the_oracle(data, rule, s1, s2):
    x, y = data
    steps = 2 * (s1 + s2) + s1 + 1  # Two full cycles, and into the third's adaptive phase.
    optimizer = DP2[rule](
        0.05, 1.5, sgd_steps=s1, adaptive_steps=s2, sgd_learning_rate=0.3, sgd_l2_norm_clip=0.4,
        eps=1e-3, **NO_NOISE, **rho_of(rule),
    )  # fmt: skip
    ours = train(logistic_model(FEATURES, optimizer), x, y, batches(steps))
    expected = oracle.dp2(
        oracle.logistic_gradients(x, y), np.zeros(FEATURES + 1), batches(steps), rule=rule, s1=s1, s2=s2,
        lr=0.05, lr_sgd=0.3, clip_norm=1.5, clip_sgd=0.4, eps=1e-3, batch_size=BATCH, **rho_of(rule),
    )  # fmt: skip
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", DP2)
def test_dp2_without_noise_and_clip_is_the_delayed_recursion(data, rule):
    """The non-private method: mean gradients g, D of the last delay's mean, w <- w - lr g / D."""
    x, y = data
    optimizer = DP2[rule](0.05, np.inf, sgd_learning_rate=0.3, delay=3, eps=1e-2, **NO_NOISE, **rho_of(rule))
    ours = train(logistic_model(FEATURES, optimizer), x, y, batches(16))
    w, v, past, path = np.zeros(FEATURES + 1), np.zeros(FEATURES + 1), [], []
    for t, rows in enumerate(batches(16)):
        path.append(w)
        g = np.mean(oracle.logistic_gradients(x, y)(w, rows), axis=0)
        if t % 6 < 3:
            w, past = w - 0.3 * g, [*past, g][-3:]
        else:
            v = oracle.RULES[rule](v, np.mean(past, axis=0) ** 2, 0.8) if t % 6 == 3 else v
            w = w - 0.05 * g / (np.sqrt(v) + 1e-2)
    np.testing.assert_allclose(ours, [*path, w], rtol=1e-5, atol=1e-5)


def standard_normals(seed, steps, stream=0):
    """What a seeded optimizer draws, step by step: [kernel, bias], which are small and drawn at once."""
    source = NoiseSource(seed)
    draw = lambda t: source.normal([FEATURES + 1], tf.constant(t, tf.int64), stream=stream, variable=0)  # noqa: E731
    return [draw(t).numpy() for t in range(steps)]


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("rule", DP2)
def test_dp2_with_known_noise_equals_the_oracle(data, rule, bias_correction):
    x, y = data
    arguments = dict(bias_correction=bias_correction, eps=1e-2, **rho_of(rule))
    optimizer = DP2[rule](
        0.05, 1.5, 0.7, sgd_steps=2, adaptive_steps=3, sgd_learning_rate=0.3, sgd_l2_norm_clip=0.4,
        expected_batch_size=BATCH, noise_seed=3, **arguments,
    )  # fmt: skip
    ours = train(logistic_model(FEATURES, optimizer), x, y, batches(13))
    expected = oracle.dp2(
        oracle.logistic_gradients(x, y), np.zeros(FEATURES + 1), batches(13), rule=rule, s1=2, s2=3,
        lr=0.05, lr_sgd=0.3, clip_norm=1.5, clip_sgd=0.4, batch_size=BATCH, sigma=0.7,
        noise=standard_normals(3, 13), **arguments,
    )  # fmt: skip
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


ABLATIONS = {
    "rmsprop": (dp2.DP2RMSpropNoiseFirst, dp2.DP2RMSpropExtraQuery),
    "adagrad": (dp2.DP2AdagradNoiseFirst, dp2.DP2AdagradExtraQuery),
}


@pytest.mark.parametrize("sigma", [0.0, 0.7])
@pytest.mark.parametrize("rule", ABLATIONS)
def test_ablations_equal_the_oracle(data, rule, sigma):
    x, y = data
    noise_first, extra_query = (
        kind(
            0.05, 1.5, sigma, delay=3, sgd_learning_rate=0.3, sgd_l2_norm_clip=0.4, eps=1e-2,
            expected_batch_size=BATCH, noise_seed=3, **rho_of(rule),
        )
        for kind in ABLATIONS[rule]
    )  # fmt: skip
    common = dict(
        rule=rule, lr=0.05, lr_sgd=0.3, clip_norm=1.5, clip_sgd=0.4, eps=1e-2, batch_size=BATCH, sigma=sigma,
        **rho_of(rule),
    )  # fmt: skip
    first, second = (standard_normals(3, 13, stream) for stream in (0, 2))
    start = (oracle.logistic_gradients(x, y), np.zeros(FEATURES + 1), batches(13))
    for optimizer, expected in (
        (noise_first, oracle.dp2(*start, s1=3, s2=3, noise=first, noise_first=True, **common)),
        (extra_query, oracle.extra_query(*start, s=3, noise=list(zip(first, second)), **common)),
    ):
        ours = train(logistic_model(FEATURES, optimizer), x, y, batches(13))
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("halving", [False, True])
@pytest.mark.parametrize(
    "delay, power, shrinkage", [(1, 1.0, 0.0), (4, 1.0, 4.0), (4, 0.5, 4.0), (4, 0.0, 0.5)]
)
def test_the_noise_floor_equals_the_oracle(data, delay, power, shrinkage, halving):
    x, y = data
    shape = dict(delay=delay, power=power, shrinkage=shrinkage)
    rate = keras.optimizers.schedules.ExponentialDecay(0.2, 5, 0.5) if halving else 0.2
    optimizer = dp2.DP2NoiseFloor(rate, 0.8, 0.1, expected_batch_size=BATCH, noise_seed=3, **shape)
    model = logistic_model(FEATURES, optimizer)
    ours = train(model, x, y, batches(13))
    expected = oracle.noise_floor(
        oracle.logistic_gradients(x, y), np.zeros(FEATURES + 1), batches(13), clip_norm=0.8,
        lr=lambda t: 0.2 * 0.5 ** (t / 5 if halving else 0),
        batch_size=BATCH, sigma=0.1, noise=standard_normals(3, 13), **shape,
    )  # fmt: skip
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    assert max(np.max(v) for v in optimizer.second_moments().values()) > optimizer._floor  # It scales.


@pytest.mark.parametrize("shrinkage", [0.0, 4.0])
def test_the_pilot_equals_the_oracle(data, shrinkage):
    x, y = data
    terms = dict(delay=4, power=0.5, shrinkage=shrinkage)
    optimizer = dp2.DP2NoiseFloor(0.2, 0.8, 0.1, expected_batch_size=BATCH, noise_seed=3, **terms)
    optimizer.settle_rate(480)
    optimizer.start_rate(0)
    assert optimizer.pilot_steps == 12
    ours = train(logistic_model(FEATURES, optimizer), x, y, batches(25))
    gradients, start = oracle.logistic_gradients(x, y), np.zeros(FEATURES + 1)
    noise, common = standard_normals(3, 25), dict(batch_size=BATCH, sigma=0.1)
    scale = oracle.pilot(
        gradients, start, batches(25)[:12], clip_norm=0.01 * 0.8**2, noise=noise[:12], **common
    )
    assert scale.max() > 1.5 * scale.min()
    relative = scale[:-1] / np.exp(np.mean(np.log(scale[:-1])))
    stretch = np.append(np.minimum(relative, 1.0), 1.0)  # Of the kernel, and the bias.
    expected = oracle.noise_floor(
        gradients, start, batches(25)[12:], clip_norm=0.8, lr=lambda t: 0.2, noise=noise[12:], scale=scale,
        stretch=stretch, **common, **terms,
    )  # fmt: skip
    np.testing.assert_array_equal(ours[:13], np.zeros_like(ours[:13]))
    np.testing.assert_allclose(ours[12:], expected, rtol=1e-4, atol=1e-5)


VANILLA = {
    "sgd": (dp2.DPSGD, {}, dict(rule=None)),
    "rmsprop": (dp2.DPRMSprop, dict(rho=0.8, eps=1e-3), dict(rule="rmsprop", rho=0.8, eps=1e-3)),
    "adagrad": (dp2.DPAdagrad, dict(eps=1e-3), dict(rule="adagrad", eps=1e-3)),
    "yogi": (dp2.DPYogi, dict(rho=0.8, eps=1e-3), dict(rule="yogi", rho=0.8, eps=1e-3)),
    "adam": (
        dp2.DPAdam,
        dict(beta_1=0.7, beta_2=0.95, eps=1e-3),
        dict(rule="rmsprop", rho=0.95, eps=1e-3, beta_1=0.7, debias=True),
    ),
}


@pytest.mark.parametrize("sigma", [0.0, 0.7])
@pytest.mark.parametrize("name", VANILLA)
def test_baselines_equal_the_oracle(data, name, sigma):
    x, y = data
    optimizer_class, arguments, oracle_arguments = VANILLA[name]
    optimizer = optimizer_class(0.1, 0.8, sigma, expected_batch_size=BATCH, noise_seed=3, **arguments)
    ours = train(logistic_model(FEATURES, optimizer), x, y, batches(12))
    expected = oracle.vanilla(
        oracle.logistic_gradients(x, y), np.zeros(FEATURES + 1), batches(12), lr=0.1, clip_norm=0.8,
        batch_size=BATCH, sigma=sigma, noise=standard_normals(3, 12), **oracle_arguments,
    )  # fmt: skip
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def paper_optimizer(name, hyper):
    """The authors' method `name` with the authors' hyper-parameters."""
    common = dict(noise_multiplier=0.0, expected_batch_size=8)
    eps, rho = dict(eps=hyper["epsilon"]), dict(rho=hyper["rmsprop_gamma"])
    delayed = dict(
        learning_rate=hyper["lr2"], l2_norm_clip=hyper["clip2"], sgd_learning_rate=hyper["lr"],
        sgd_l2_norm_clip=hyper["clip1"], delay=hyper["interval"], **common, **eps,
    )  # fmt: skip
    plain = dict(learning_rate=hyper["lr"], l2_norm_clip=hyper["clip1"], **common)
    noise_first = {**delayed, "l2_norm_clip": hyper["clip1"]}
    extra_query = {**delayed, "learning_rate": hyper["lr"]}
    return {
        "dp2_rmsprop": lambda: dp2.DP2RMSprop(**delayed, **rho),
        "dp2_adagrad": lambda: dp2.DP2Adagrad(**delayed),
        "dp2_rmsprop_noise_then_precond": lambda: dp2.DP2RMSpropNoiseFirst(**noise_first, **rho),
        "dp2_adagrad_noise_then_precond": lambda: dp2.DP2AdagradNoiseFirst(**noise_first),
        "dp2_rmsprop_ablation1": lambda: dp2.DP2RMSpropExtraQuery(**extra_query, **rho),
        "dp2_adagrad_ablation1": lambda: dp2.DP2AdagradExtraQuery(**extra_query),
        "dp_sgd": lambda: dp2.DPSGD(**plain),
        "dp_rmsprop": lambda: dp2.DPRMSprop(**plain, **eps, **rho),
        "dp_adagrad": lambda: dp2.DPAdagrad(**plain, **eps),
        "dp_adam": lambda: dp2.DPAdam(**plain, **eps, beta_1=hyper["beta1"], beta_2=hyper["beta2"]),
    }[name]()


@pytest.mark.parametrize(
    "name",
    """dp2_rmsprop dp2_adagrad dp2_rmsprop_noise_then_precond dp2_adagrad_noise_then_precond
    dp2_rmsprop_ablation1 dp2_adagrad_ablation1 dp_sgd dp_rmsprop dp_adagrad dp_adam""".split(),
)
def test_equals_the_authors_code(golden, name):
    x, y = np.array(golden["x"], np.float32), np.array(golden["y"], np.float32)
    rows = [np.arange(8 * t, 8 * (t + 1)) for t in range(golden["steps"])]
    ours = train(logistic_model(6, paper_optimizer(name, golden["hyper"])), x, y, rows)
    np.testing.assert_allclose(ours, golden["methods"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_dp2_stopped_inside_a_phase_is_the_start_of_a_longer_run(data, stop):
    x, y = data
    make = lambda: dp2.DP2RMSprop(0.05, 1.5, 0.5, delay=2, expected_batch_size=BATCH, noise_seed=1)  # noqa: E731
    short = train(logistic_model(FEATURES, make()), x, y, batches(stop))
    long = train(logistic_model(FEATURES, make()), x, y, batches(6))
    np.testing.assert_array_equal(short, long[: stop + 1])


@pytest.mark.parametrize("schedule", [False, True])
def test_dpsgd_without_clip_and_noise_is_keras_sgd(data, schedule):
    x, y = data
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5) if schedule else 0.1
    private = logistic_model(FEATURES, dp2.DPSGD(rate, np.inf, 0.0, weight_decay=0.01))
    plain = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    plain.compile(
        optimizer=keras.optimizers.SGD(rate, weight_decay=0.01),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    for model in (private, plain):
        fit_in_order(model, x, y, batch_size=BATCH, epochs=2)
    np.testing.assert_allclose(flat_weights(private), flat_weights(plain), rtol=1e-5, atol=1e-6)


def test_rates_follow_their_schedules_in_both_phases(data):
    x, y = data
    halving = lambda start: keras.optimizers.schedules.ExponentialDecay(start, 1, 0.5)  # noqa: E731
    optimizer = dp2.DP2RMSprop(
        halving(1.0), 1.0, sgd_learning_rate=halving(8.0), delay=2, eps=1e-3, **NO_NOISE
    )
    path = train(logistic_model(FEATURES, optimizer), x, y, batches(4))
    gradients = oracle.logistic_gradients(x, y)
    first = sum(oracle.clip(g, 1.0) for g in gradients(path[0], batches(1)[0])) / BATCH
    np.testing.assert_allclose(path[0] - path[1], 8.0 * first, rtol=1e-5)
    second = sum(oracle.clip(g, 1.0) for g in gradients(path[1], batches(2)[1])) / BATCH
    np.testing.assert_allclose(path[1] - path[2], 4.0 * second, rtol=1e-4)
    scale = 1 / (np.sqrt(0.1 * ((first + second) / 2) ** 2) + 1e-3)
    third = sum(oracle.clip(scale * g, 1.0) for g in gradients(path[2], batches(3)[2])) / BATCH
    np.testing.assert_allclose(path[2] - path[3], 0.25 * third, rtol=1e-3)
