"""A file that is written ahead of the steps counts them, whatever becomes of the process."""

import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_model_ledger import NOT_COUNTED, B, Interrupt, N, X, fit, model_of, optimizer, saved_weights

from dp2_keras.ledger_file import LedgerFile


def test_a_ledger_file_counts_what_the_model_counts(tmp_path):
    model, path = model_of(lambda: optimizer(expected_batch_size=B)), tmp_path / "ledger.jsonl"
    model.train_on_batch(X[:B], X[:B])
    fit(model, epochs=2, ledger_file=path)
    model.train_on_batch(X[:B], X[:B])
    with pytest.raises(KeyboardInterrupt):
        fit(model, epochs=2, callbacks=[Interrupt(3)])
    assert model.ledger.steps == 1 + 10 + 1 + 3
    model.release_ledger_file()
    with LedgerFile(path) as file:
        assert file.ledger == model.ledger


def test_a_ledger_file_counts_branches_and_lost_steps(tmp_path):
    path = tmp_path / "ledger.jsonl"
    model = model_of()
    fit(model, ledger_file=path)
    model.save(tmp_path / "model.keras")
    fit(model)
    model.release_ledger_file()
    branch = keras.saving.load_model(tmp_path / "model.keras")
    assert branch.ledger.steps == 5
    fit(branch, ledger_file=path)
    assert branch.ledger.steps == 15
    branch.load_weights(saved_weights(model, tmp_path))
    assert branch.ledger.steps == 15  # Never rewound.


def test_a_step_that_was_not_written_ahead_is_refused(tmp_path):
    model = model_of(lambda: optimizer(expected_batch_size=B))
    fit(model, ledger_file=tmp_path / "ledger.jsonl")
    before = model.get_weights()[0]
    with pytest.raises(tf.errors.InvalidArgumentError, match=NOT_COUNTED):
        model.train_step((tf.constant(X[:B]), tf.constant(X[:B])))
    np.testing.assert_array_equal(model.get_weights()[0], before)
    assert model.ledger.steps == 5


def test_one_file_at_a_time(tmp_path):
    model = model_of()
    fit(model, ledger_file=tmp_path / "one.jsonl")
    fit(model, ledger_file=tmp_path / "one.jsonl")
    with pytest.raises(ValueError, match="`ledger_file` must stay the one"):
        fit(model, ledger_file=tmp_path / "other.jsonl")
    with pytest.raises(BlockingIOError, match="in use by another run"):
        fit(model_of(), ledger_file=tmp_path / "one.jsonl")


def test_a_killed_process_is_counted_in_full(tmp_path):
    path = tmp_path / "ledger.jsonl"
    code = f"""
        import os, keras, numpy as np, dp2_keras as dp2
        class Kill(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if self.params and int(self.model.optimizer.iterations) == 8:
                    os.kill(os.getpid(), 9)
        x = np.zeros(({N}, 1), np.float32)
        model = dp2.DP2Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(dp2.DPSGD(0.1, 1.0, 1.0), loss="mse")
        model.fit(x, x, batch_size={B}, epochs=3, verbose=0, ledger_file={str(path)!r}, callbacks=[Kill()])
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert result.returncode == -9, result.stderr
    with LedgerFile(path) as file:
        assert file.ledger.steps == 10  # 8 ran; the second epoch was reserved whole.
    model = model_of()
    fit(model, ledger_file=path)
    assert model.ledger.steps == 15
