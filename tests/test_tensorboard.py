"""TensorBoard shows what the run spent, how it clipped, and what its preconditioner is made of."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp2_keras as dp2
from dp2_keras.diagnostics import Diagnostics
from dp2_keras.tensorboard import QUANTILES

X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)


def model_of(optimizer=None, **arguments):
    model = dp2.DP2Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")])
    optimizer = optimizer or dp2.DP2RMSprop(0.1, 1.0, 1.0, delay=2)
    model.compile(optimizer, loss="mse", **arguments)
    return model


def events(path):
    """Every value that was written, by tag: a list over epochs."""
    values = {}
    for file in sorted((path / "privacy").iterdir()):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                values.setdefault(value.tag, []).append(tf.make_ndarray(value.tensor))
    return values


@pytest.fixture
def written(tmp_path):
    model = model_of()
    history = model.fit(
        X, X[:, 0], batch_size=10, epochs=3, verbose=0, callbacks=[dp2.PrivacyTensorBoard(tmp_path)]
    ).history
    return model, history, events(tmp_path)


def test_scalars_are_those_of_the_history(written):
    _, history, values = written
    for name in ("epsilon", "phase", "clipped_fraction"):
        np.testing.assert_allclose(values[f"privacy/{name}"], history[name], rtol=1e-6)


def test_quantiles_of_the_norms_are_in_order(written):
    _, _, values = written
    quantiles = np.array([values[f"norms/q{100 * q:.0f}"] for q in QUANTILES])
    assert quantiles.shape == (6, 3) and (np.diff(quantiles, axis=0) >= 0).all() and (quantiles > 0).all()


def test_histograms_hold_the_preconditioner(written):
    model, _, values = written
    tags = [tag for tag in values if tag.startswith("preconditioner/")]
    assert len(tags) == len(model.trainable_variables)
    (kernel,) = [tag for tag in tags if "kernel" in tag]
    moment = np.sqrt(model.optimizer.second_moments()[kernel.split("/", 1)[1]].numpy())
    left, right, counts = values[kernel][-1].T  # Bins: left edge, right edge, count.
    assert counts.sum() == moment.size
    np.testing.assert_allclose([left.min(), right.max()], [moment.min(), moment.max()], rtol=1e-4)


def test_quantiles_are_true_to_five_percent():
    norms = np.random.default_rng(0).lognormal(sigma=2.0, size=5000).astype(np.float32)
    diagnostics = Diagnostics(keep_norms=True)
    for part in np.split(norms, 10):
        diagnostics.update(0.0, tf.constant(part), 1.0)
    np.testing.assert_allclose(diagnostics.quantiles(QUANTILES), np.quantile(norms, QUANTILES), rtol=0.06)
    diagnostics.reset()
    assert diagnostics.quantiles(QUANTILES) == []


@pytest.mark.parametrize("norm", [0.0, 1e-30, 1e30, np.inf])
def test_extreme_norms_have_a_bin(norm):
    diagnostics = Diagnostics(keep_norms=True)
    diagnostics.update(0.0, tf.constant([norm], tf.float32), 1.0)
    assert np.isfinite(diagnostics.quantiles([0.5])).all()


def test_without_a_preconditioner_there_are_no_histograms(tmp_path):
    model = model_of(dp2.DPSGD(0.1, 1.0, 1.0), diagnostics=False, jit_compile=True)
    model.fit(X, X[:, 0], batch_size=10, verbose=0, callbacks=[dp2.PrivacyTensorBoard(tmp_path)])
    assert not [tag for tag in events(tmp_path) if tag.startswith("preconditioner/")]


def test_a_plain_model_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="PrivacyTensorBoard needs a private model"):
        model.fit(X, X[:, 0], verbose=0, callbacks=[dp2.PrivacyTensorBoard(tmp_path)])
