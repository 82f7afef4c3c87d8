"""A fit that was killed goes on where it was, whatever the kill left of its backup, or is refused."""

import json
import os

import keras
import numpy as np
import pytest
from test_model_ledger import KERAS_3, B, Interrupt, N, X, fit, model_of, optimizer

EPOCHS, STEPS = 4, N // B

keras_3 = pytest.mark.skipif(not KERAS_3, reason="Keras 2 writes epoch, step and weights as one checkpoint.")


def make():
    return model_of(lambda: optimizer(noise_seed=3))


@pytest.fixture(scope="module")
def whole():
    """A model that nobody interrupted."""
    keras.utils.set_random_seed(1)
    model = make()
    fit(model, epochs=EPOCHS)
    return model


def backup(path, **arguments):
    return keras.callbacks.BackupAndRestore(str(path / "backup"), **arguments)


def interrupt(path, after=13, **arguments):
    """Leaves the backup of a fit that ended by force after so many steps."""
    keras.utils.set_random_seed(1)
    with pytest.raises(KeyboardInterrupt):
        fit(make(), epochs=EPOCHS, callbacks=[backup(path, **arguments), Interrupt(after)])
    return path / "backup" / "training_metadata.json", path / "backup" / "latest.weights.h5"


def resume(path, whole, epochs, **arguments):
    """Goes on, for so many epochs, to the very weights of the fit that nobody interrupted."""
    model = make()
    history = fit(model, epochs=EPOCHS, callbacks=[backup(path, **arguments)])
    assert history.epoch == list(range(EPOCHS - epochs, EPOCHS))
    assert int(model.optimizer.iterations) == EPOCHS * STEPS
    assert model.ledger == whole.ledger
    np.testing.assert_array_equal(model.get_weights()[0], whole.get_weights()[0])
    return model


LEFT = {
    "empty": lambda file: file.write_text(""),
    "cut": lambda file: file.write_text(file.read_text()[:9]),
    "no number": lambda file: file.write_text('{"epoch": "2"}'),
    "missing": lambda file: file.unlink(),
    "of the epoch before": lambda file: file.write_text('{"epoch": 1, "batch": 0}'),
}


@keras_3
@pytest.mark.parametrize(
    "left, save_freq", [*((left, "epoch") for left in LEFT), ("empty", 3), ("missing", 3)]
)
def test_a_fit_goes_on_whatever_is_left_of_the_epoch(tmp_path, whole, left, save_freq):
    epoch, _ = interrupt(tmp_path, save_freq=save_freq)
    assert json.loads(epoch.read_text())["epoch"] == 2
    LEFT[left](epoch)
    resume(tmp_path, whole, epochs=2, save_freq=save_freq)


@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_a_fit_that_was_killed_before_its_first_backup_starts_anew(tmp_path, whole, save_freq):
    interrupt(tmp_path, after=2, save_freq=save_freq)
    keras.utils.set_random_seed(1)
    resume(tmp_path, whole, epochs=4, save_freq=save_freq)


@keras_3
def test_a_fit_that_was_killed_while_its_backup_was_deleted_is_done(tmp_path, whole, monkeypatch):
    from keras.src.utils import file_utils

    def killed(path):
        assert not os.path.exists(os.path.join(path, "training_metadata.json"))
        raise KeyboardInterrupt

    keras.utils.set_random_seed(1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(file_utils, "rmtree", killed)
        fit(make(), epochs=EPOCHS, callbacks=[backup(tmp_path)])
    resume(tmp_path, whole, epochs=0)
    assert not (tmp_path / "backup").exists()


@keras_3
def test_a_backup_that_is_kept_keeps_its_epoch(tmp_path):
    fit(make(), epochs=EPOCHS, callbacks=[backup(tmp_path, delete_checkpoint=False)])
    assert (tmp_path / "backup" / "training_metadata.json").exists()


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 itself fails in a fit after one with a BackupAndRestore.")
def test_a_fit_after_one_that_went_on_is_a_fit_of_its_own(tmp_path, whole):
    interrupt(tmp_path)
    model = resume(tmp_path, whole, epochs=2)
    assert fit(model, epochs=3).epoch == [0, 1, 2]
    assert model.ledger.steps == (EPOCHS + 3) * STEPS


@keras_3
def test_an_epoch_without_weights_is_refused(tmp_path):
    _, weights = interrupt(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"must have the weights .*Received: '.*training_metadata\.json'"):
        fit(make(), epochs=EPOCHS, callbacks=[backup(tmp_path)])


@keras_3
def test_a_torn_epoch_is_refused_where_the_steps_do_not_tell_it(tmp_path):
    epoch, _ = interrupt(tmp_path)
    epoch.write_text("")
    model = model_of(lambda: optimizer(expected_batch_size=B))
    batches = ((X[i : i + B], X[i : i + B]) for i in range(0, N, B))
    with pytest.raises(
        ValueError, match="which epoch comes next.*Received: steps_per_epoch=None, '.*backup'"
    ):
        model.fit(batches, epochs=EPOCHS, dataset_size=N, callbacks=[backup(tmp_path)], verbose=0)
    assert model.ledger.steps == 2 * STEPS, "What was restored, and no step more."


@keras_3
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_torn_weights_are_refused_by_name(tmp_path, share):
    _, weights = interrupt(tmp_path)
    data = weights.read_bytes()
    weights.write_bytes(data[: int(share * len(data))])
    with pytest.raises(OSError, match=r"must be whole: .*Received: '.*latest\.weights\.h5'"):
        fit(make(), epochs=EPOCHS, callbacks=[backup(tmp_path)])


@keras_3
def test_torn_weights_of_a_double_backup_give_way_to_those_before(tmp_path, whole):
    epoch, weights = interrupt(tmp_path, double_checkpoint=True)
    weights.write_bytes(weights.read_bytes()[:100])
    epoch.write_text("")
    resume(tmp_path, whole, epochs=3, double_checkpoint=True)


# A file of weights is written as a whole.


class Killed(BaseException):
    """Nothing that a program would catch."""


@pytest.mark.parametrize("moment", ["replace", "fsync"])
def test_a_file_of_weights_is_the_old_one_or_the_new_one(tmp_path, monkeypatch, moment):
    model, path = make(), tmp_path / "model.weights.h5"
    fit(model)
    model.save_weights(path)
    before = path.read_bytes()
    fit(model)

    def kill(*arguments):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, moment, kill)
        model.save_weights(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.weights.h5"]
    model.save_weights(path)
    other = make()
    other.load_weights(path)
    assert other.ledger.steps == 2 * STEPS


def test_weights_that_cannot_be_written_leave_the_old_ones(tmp_path, monkeypatch):
    model, path = make(), tmp_path / "model.weights.h5"
    fit(model)
    model.save_weights(path)
    before = path.read_bytes()

    def full(store):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model), "save_own_variables", lambda self, store: full(store))
    with pytest.raises(OSError, match="No space left"):
        model.save_weights(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.weights.h5"]


def test_weights_are_saved_through_a_link(tmp_path):
    model, link = make(), tmp_path / "latest.weights.h5"
    fit(model)
    link.symlink_to(tmp_path / "first.weights.h5")
    model.save_weights(link)
    assert link.is_symlink() and (tmp_path / "first.weights.h5").stat().st_size > 0


def test_a_file_that_does_not_exist_is_said_not_to_exist(tmp_path):
    with pytest.raises(FileNotFoundError):
        make().load_weights(tmp_path / "none.weights.h5")
