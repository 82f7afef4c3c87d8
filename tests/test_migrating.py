"""Coming from TF Privacy: the same step, the same epsilon, the same names; and the guide is true."""

import contextlib
import pathlib
import re
import runpy

import keras
import numpy as np
import pytest

import dp2_keras as dp2
from dp2_keras import accounting, cli

ROOT = pathlib.Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
OURS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)  # What is not ours is shown as a diff.
OPTIMIZERS = [dp2.DPSGD, dp2.DPRMSprop, dp2.DPAdagrad, dp2.DPYogi, dp2.DPAdam]
RATE, CLIP = 0.5, 2.0


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "migrate_from_tf_privacy.py"))


@pytest.fixture
def tf_privacy():
    reason = "TF Privacy is installed on the classic stack alone"
    return pytest.importorskip("tensorflow_privacy", reason=reason)


def images(count, seed=0):
    """Images like MNIST's, with labels that are seen in them."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    pixels = rng.integers(0, 100, (count, 28, 28))
    pixels[np.arange(count), 2 * labels + 4] = 255
    return pixels.astype("uint8"), labels.astype("uint8")


def batch(count):
    x, y = images(count)
    scale = np.linspace(0.1, 1.0, count)  # Gradients of different norms, some above the clip.
    return (scale[:, None, None, None] * x[..., None] / 255).astype("float32"), y


def cross_entropy(**arguments):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def our_model(layers, **arguments):
    model = dp2.make_private(keras.Sequential(layers))
    settings = dict(learning_rate=RATE, l2_norm_clip=CLIP, noise_multiplier=0.0, expected_batch_size=6)
    model.compile(dp2.DPSGD(**{**settings, **arguments}), loss=cross_entropy())
    return model


def their_optimizer_model(library, layers):
    model = keras.Sequential(layers)
    optimizer = library.DPKerasSGDOptimizer(
        l2_norm_clip=CLIP, noise_multiplier=0.0, num_microbatches=6, learning_rate=RATE
    )
    model.compile(optimizer, loss=cross_entropy(reduction="none"))
    return model


def their_private_model(library, layers):
    settings = dict(l2_norm_clip=CLIP, noise_multiplier=0.0, use_xla=False)
    model = library.DPSequential(**settings, layers=layers)
    model.compile(keras.optimizers.SGD(RATE), loss=cross_entropy())
    return model


# The same step and the same epsilon.


@pytest.mark.parametrize("theirs", [their_optimizer_model, their_private_model])
def test_a_clipped_step_equals_tf_privacys(theirs, example, tf_privacy):
    ours, x_y = our_model(example["layers"]()), batch(6)
    theirs = theirs(tf_privacy, example["layers"]())
    start = ours.get_weights()
    theirs.set_weights(start)
    clipped = ours.train_on_batch(*x_y, return_dict=True)["clipped_fraction"]
    theirs.train_on_batch(*x_y)
    assert 0 < clipped < 1
    for before, mine, other in zip(start, ours.get_weights(), theirs.get_weights()):
        assert np.abs(mine - before).max() > 1e-3
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


def test_the_epsilon_of_a_fit_equals_tf_privacys(example, tf_privacy):
    library = pytest.importorskip("tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib")
    model = dp2.make_private(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    model.compile(dp2.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1), loss="mse")
    model.fit(np.ones((310, 2)), np.ones((310, 1)), batch_size=30, epochs=2, verbose=0)
    steps, rate = 20, 30 / 310
    theirs = library._compute_dp_sgd_example_privacy(
        num_epochs=(steps - 0.5) * rate,  # It rounds the steps up.
        noise_multiplier=1.1,
        example_delta=1e-3,
        used_microbatching=False,
        poisson_subsampling_probability=rate,
    )
    np.testing.assert_allclose(model.privacy_spent(), theirs, rtol=1e-9)
    args = example["parse"](["--batch-size", "30", "--epochs", "2"])
    assert example["tf_privacy_epsilon"](args, 310) == pytest.approx(theirs, abs=5.1e-4)


def test_weights_of_tf_privacy_carry_over(example, tf_privacy, tmp_path):
    theirs, x_y = their_private_model(tf_privacy, example["layers"]()), batch(6)
    theirs.train_on_batch(*x_y)
    for name in ("w.weights.h5", "w.h5", "checkpoint"):
        theirs.save_weights(str(tmp_path / name))
        ours = our_model(example["layers"]())
        warns = pytest.warns(UserWarning, match="keeps the state it has")
        with warns if name == "w.weights.h5" else contextlib.nullcontext():
            ours.load_weights(str(tmp_path / name))
        np.testing.assert_array_equal(ours.predict(x_y[0], verbose=0), theirs.predict(x_y[0], verbose=0))
        assert ours.ledger.steps == 0


# TF Privacy's arguments.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tf_privacys_names_are_taken(optimizer):
    names = dict(l2_norm_clip=1.5, noise_multiplier=1.3, num_microbatches=250, learning_rate=0.25)
    config = optimizer(**names).get_config()
    assert {name: config[name] for name in names} == names
    assert optimizer(**{**names, "num_microbatches": None}).num_microbatches is None
    assert optimizer(**names, expected_batch_size=250).batch_size == 250


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 50, 500])
def test_microbatches_of_several_examples_are_refused(optimizer, count):
    with pytest.raises(ValueError, match="clipped as one.*Received: num_microbatches="):
        optimizer(0.25, 1.5, 1.3, num_microbatches=count, expected_batch_size=250)


@pytest.mark.parametrize("count", [0, -1, 2.5, True])
def test_microbatches_must_be_a_number(count):
    with pytest.raises(ValueError, match="num_microbatches"):
        dp2.DPSGD(0.25, 1.5, 1.3, num_microbatches=count)


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_fit_checks_microbatches(sampling):
    x, y = np.ones((60, 2)), np.ones((60, 1))
    model = dp2.make_private(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    model.compile(dp2.DPSGD(0.1, 1.0, 1.1, num_microbatches=20), loss="mse")
    start = model.get_weights()
    with pytest.raises(ValueError, match="clipped as one.*batch size 30"):
        model.fit(x, y, batch_size=30, sampling=sampling, verbose=0)
    assert model.ledger.steps == 0
    np.testing.assert_array_equal(model.get_weights()[0], start[0])
    model.fit(x, y, batch_size=20, sampling=sampling, verbose=0)
    assert model.ledger.steps == 3


def test_what_has_no_counterpart_is_refused():
    with pytest.raises(ValueError, match="physical_batch_size"):
        dp2.DPSGD(0.1, 1.0, 1.1, gradient_accumulation_steps=2)
    dp2.DPSGD(0.1, 1.0, 1.1, gradient_accumulation_steps=1)  # TF Privacy's default, which means none.
    with pytest.raises(TypeError, match="momentum"):
        dp2.DPSGD(0.1, 1.0, 1.1, momentum=0.9)


def test_an_unreduced_loss_may_stay():
    x, y = np.ones((6, 2)), np.arange(6) % 3
    weights = []
    for arguments in ({}, {"reduction": "none"}):
        layers = [keras.Input((2,)), keras.layers.Dense(3, kernel_initializer="zeros")]
        model = dp2.make_private(keras.Sequential(layers))
        optimizer = dp2.DPSGD(0.1, 1.0, 0.0, expected_batch_size=6)
        model.compile(optimizer, loss=cross_entropy(**arguments))
        model.train_on_batch(x, y)
        weights.append(model.get_weights()[0])
    np.testing.assert_array_equal(*weights)


# The example and the guide.


def table(output):
    """The rows of the printed table, by method."""
    lines = output.split("total s\n")[1].splitlines()
    return {line[:32].strip(): line[32:].split() for line in lines}


@pytest.fixture
def mnist(tmp_path):
    """A file like mnist.npz."""
    (x_train, y_train), (x_test, y_test) = images(300), images(50, seed=1)
    path = tmp_path / "mnist.npz"
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return str(path)


def test_the_example_prints_its_table(example, mnist, capsys):
    example["main"](["--data", mnist, "--train-size", "60", "--batch-size", "20"])
    output = capsys.readouterr().out
    rows = table(output)
    imported = example["tensorflow_privacy"] is not None
    assert ("TF Privacy cannot be imported here" in output) == (not imported)
    assert list(rows) == [*(example["METHODS"] if imported else ["dp2_keras"]), "majority class"]
    event = accounting.dp_event(1.1, sampling_probability=20 / 60, steps=3)
    epsilon = f"{accounting.epsilon(event, dp2.default_delta(60)):.3f}"
    assert {row[0] for row in rows.values()} == {epsilon, "-"}
    assert "60 images" in output and "no guarantee" in output


@pytest.mark.slow
def test_the_guide_runs_as_pasted(monkeypatch, tmp_path, capsys):
    """In one go, on few images and for one epoch."""
    assert len(OURS) == 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(keras.datasets.mnist, "load_data", lambda: (images(500), images(50, seed=1)))
    exec(compile(re.sub(r"epochs=\d+", "epochs=1", "\n".join(OURS)), "migrating.md", "exec"), {})
    output = capsys.readouterr().out
    assert "The training was differentially private" in output


def test_the_guides_figures_are_right(capsys):
    rate, steps = 250 / 60_000, 15 * 240
    poisson = accounting.epsilon(accounting.dp_event(1.1, rate, steps), 1e-5)
    halved = accounting.epsilon(accounting.dp_event(0.55, rate, steps), 1e-5)
    shuffled = accounting.price([(accounting.gaussian(1.1), 15)], 1e-5)
    assert [f"{poisson:.3f}", f"{shuffled:.1f}"] == ["1.265", "21.9"]
    assert halved == pytest.approx(9.025, abs=0.02)  # The accountant's versions differ.
    for figure in ("1.265", "9.025", "21.9 instead of 1.27"):
        assert figure in GUIDE
    (command,) = re.findall(r"^    dp2 (epsilon .*)$", GUIDE, re.MULTILINE)
    assert cli.main(command.split()) == 0
    assert "1.2655" in capsys.readouterr().out
