"""Training that knows what it costs: `fit` and `train_on_batch` with a ledger, and its price.

    fit(x, y)  ->  Poisson batches, a run of the account for each epoch, epsilon in the log

The ledger belongs to the model: it survives recompiles, is saved with the weights and loaded with
them, and prices their history.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings

import numpy as np
import tensorflow as tf

from dp2_keras import _keras, accounting, calibration, fitting, replicas, validation
from dp2_keras.account import Account, Budget, common_account, note_account, noted_accounts
from dp2_keras.callbacks import FitAccount, PrivacyBudget
from dp2_keras.entries import PoissonSampling, UnknownSampling
from dp2_keras.ledger import LEDGER_NAME, Ledger
from dp2_keras.statement import Statement, statement

keras = _keras.keras


class AccountedTraining(_keras.BuiltByShape):
    """The part of a private model that counts and prices; see `PrivateTraining` for the step."""

    _account = None

    def account(self) -> Account:
        """The one account of the model's layers, and of all models that share one of them."""
        layers = _keras.flatten_layers(self)
        own = [] if self._account is None else [self._account]
        account = common_account([*own, *noted_accounts(layers)])
        note_account(account, layers)
        if account is not self._account:
            self._account, self._ledger_state = account, _LedgerState(account)
            self.train_function = None  # It counts with the meter of the account it was traced with.
        return account

    def release_ledger_file(self) -> None:
        """Closes the ledger file, so that another model of this process can use it."""
        self.account().release_file()
        self._idle()

    @property
    def ledger(self) -> Ledger:
        """The steps that these weights have taken."""
        return self.account().ledger

    def privacy_spent(
        self, delta: float | None = None, *, accountant: str = "rdp", neighbors: str = "add_remove"
    ) -> float:
        """What the weights have cost: the proved epsilon of every step that ran.

        Steps of a fit with `assume_poisson=True` are priced by that assumption.

        Args:
            delta: above 0 and below 1. Defaults to the largest power of ten that is at most 1 / n.
            accountant: "rdp" (what TF Privacy uses) or "pld" (tighter, slower).
            neighbors: "add_remove" one example, or "replace_one".

        Returns:
            Epsilon; 0 if nothing ran, infinity without noise.

        Raises:
            ValueError: for a value out of range, and without a `delta` if no fit has told n.

        Example:
        >>> import dp2_keras as dp2
        >>> model = dp2.DP2Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(dp2.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=2.0), loss="mse")
        >>> _ = model.fit(np.ones((100, 2)), np.ones((100, 1)), batch_size=10, epochs=3, verbose=0)
        >>> f"{model.privacy_spent(delta=1e-2):.2f}"
        '0.63'
        """
        return self.ledger.epsilon(delta, accountant=accountant, neighbors=neighbors)

    def privacy_statement(
        self, delta: float | None = None, *, accountant: str = "rdp", neighbors: str = "add_remove"
    ) -> Statement:
        """What can be claimed for the weights, in words (`str`) and as data (`to_json()`).

        Args:
            delta: above 0 and below 1. Defaults to the largest power of ten that is at most 1 / n.
            accountant: "rdp" or "pld".
            neighbors: "add_remove" one example, or "replace_one".

        Returns:
            A `Statement`.

        Raises:
            ValueError: for a value out of range, and without a `delta` if no fit has told n.
        """
        return statement(self.ledger, delta, accountant=accountant, neighbors=neighbors)

    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        epochs=1,
        verbose="auto",
        callbacks=None,
        *args,
        sampling=None,
        dataset_size=None,
        max_batch_size=None,
        assume_poisson=False,
        ledger_file=None,
        **kwargs,
    ):
        """Trains the model privately, and logs `epsilon` after each epoch; otherwise as in Keras.

        Each step draws a Poisson sample of arrays: every example with probability batch_size / n.
        An epoch is n // batch_size steps.

        Args:
            x: as in Keras; also scipy sparse matrices and sparse tensors.
            y: as in Keras.
            batch_size: the expected size of a batch. Defaults to the optimizer's
                `expected_batch_size`, or 32.
            epochs: as in Keras.
            verbose: as in Keras.
            callbacks: as in Keras. A `PrivacyBudget` limits what may be spent.
            *args: as in Keras.
            sampling: "poisson" or "shuffle". Arrays are sampled by default; "shuffle" keeps Keras's
                own batches, for which far less is proved. Batches of your own (a `tf.data.Dataset` or a
                generator) are taken as shuffled, unless "poisson" declares that every example is in each
                of them with probability `expected_batch_size` / n, independently.
            dataset_size: n, where the batches are your own.
            max_batch_size: keep at most so many of the examples drawn; the price includes it.
            assume_poisson: price shuffled batches as if they were Poisson samples, which is not
                proved; the statement says so. Defaults to False.
            ledger_file: a file in which every step of this model is written before it runs, so that
                crashes and other branches from one checkpoint are counted too.
            **kwargs: as in Keras.

        Returns:
            Keras's History, with `epsilon` in it.

        Raises:
            BudgetExhaustedError: if the budget does not pay for one step.
            ValueError: for a callback steered by a training metric, for a label or token out of
                range, and for arguments that do not tell how the batches are drawn.
        """
        request = fitting.Request(sampling, dataset_size, max_batch_size, assume_poisson)
        arguments = _bound(self, (x, y, batch_size, epochs, verbose, callbacks, *args), kwargs)
        if getattr(self, "optimizer", None) is None:
            return super().fit(**arguments)  # Keras says what is missing.
        self.account().check_not_fitting("fit")
        replicas.check_strategy(self.distribute_strategy, self.optimizer)
        validation.check_callbacks(callbacks)
        validation.check_ranges(self, x, y)
        sparse = _keras.has_sparse_inputs(self)
        plan = fitting.plan(
            arguments, request, self.optimizer, self._next_step, sparse, self.distribute_strategy
        )
        budget = _budget(callbacks, plan)
        self._prepare(plan, budget, ledger_file)
        counter = FitAccount(self.account(), plan, budget, _listed(callbacks))
        try:
            with self.account().fitting(), _callbacks_with(counter, callbacks, self) as callbacks:
                return super().fit(**{**plan.arguments, "callbacks": callbacks})
        finally:
            self._idle()

    def train_on_batch(
        self, *args, sampling=None, dataset_size=None, max_batch_size=None, ledger_file=None, **kwargs
    ):
        """One private step on a batch; otherwise as in Keras.

        The ledger counts it as one Gaussian without amplification, because nothing is known of how the
        batch was drawn.

        Args:
            *args: as in Keras.
            sampling: "poisson" declares that every example is in the batch with probability
                `expected_batch_size` / `dataset_size`, independently, as `poisson_batches` draws it.
            dataset_size: n, for `sampling="poisson"`.
            max_batch_size: what `poisson_batches` cut its draws to, if it did.
            ledger_file: as in `fit`.
            **kwargs: as in Keras.

        Returns:
            As in Keras.

        Raises:
            ValueError: if the declared sampling is incomplete.
            RuntimeError: while `fit` runs.
        """
        if getattr(self, "optimizer", None) is None:
            return super().train_on_batch(*args, **kwargs)  # Keras says what is missing.
        self.account().check_not_fitting("train_on_batch")
        replicas.check_one(self.distribute_strategy, "`train_on_batch`")
        self._open_batch(_declared(sampling, dataset_size, max_batch_size, self.optimizer), ledger_file)
        try:
            return super().train_on_batch(*args, **kwargs)
        finally:
            self._idle()

    def _next_step(self):
        """The step of the next batch; those that are passed over come first."""
        return int(self.optimizer.iterations.numpy()) - self.account().meter.skipped

    def _open_batch(self, sampling, ledger_file):
        """Opens a run of one step, unless the run of unknown steps between fits will do."""
        account = self.account()
        self.optimizer.check_single_step()
        if ledger_file is not None:
            account.use_file(ledger_file)
        self._retrace_if_changed()
        if sampling is None and not account.has_file:
            account.idle(self.optimizer)
        else:
            account.open(self.optimizer, sampling or UnknownSampling(), steps=1)

    def _prepare(self, plan, budget, ledger_file):
        """Everything that must hold before the first step."""
        optimizer, account = self.optimizer, self.account()
        self._step_checked = False
        if ledger_file is not None and replicas.is_chief(self.distribute_strategy):
            account.use_file(ledger_file)
        if account.has_file and plan.steps_per_epoch is None and budget.epsilon is None:
            raise ValueError(
                "`steps_per_epoch` must be given with a `ledger_file` where the number of batches is not "
                "known: the steps of an epoch are written before they run. Received: steps_per_epoch=None"
            )
        optimizer.resolve_batch_size(plan.sampling.batch_size)
        if optimizer.sigma is None:
            budget.check_remainder(account.ledger)
            optimizer.calibrate(_calibrated(plan, budget, account.ledger, optimizer))
        optimizer.settle_rate(plan.paid_steps(budget, account.ledger, optimizer.mechanism(), plan.passed))
        replicas.check_same(self.distribute_strategy, lambda: self._facts(plan))
        budget.check(account.ledger, optimizer.mechanism(), plan.sampling)
        self._retrace_if_changed()

    def _facts(self, plan):
        """What all workers must agree on."""
        optimizer, steps = self.optimizer, (plan.steps, plan.steps_per_epoch, self.ledger.steps)
        return plan.sampling, optimizer.mechanism(), optimizer.batch_size, optimizer.get_config(), steps

    def _retrace_if_changed(self):
        if self._traced_constants != self._constants():
            self.train_function = None  # Traced with another divisor or another noise.

    def _idle(self):
        """Between fits, a step counts in full."""
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and optimizer.sigma is not None:
            self.account().idle(optimizer)

    # The ledger goes where the weights go.

    def save(self, filepath, *args, **kwargs):
        """Saves the model as in Keras; a `.keras` file has the ledger."""
        _warn_without_ledger(filepath, str(filepath).endswith(".keras"))
        return super().save(filepath, *args, **kwargs)

    def save_weights(self, filepath, overwrite=True, *args, **kwargs):
        """Saves the weights as in Keras; a `.weights.h5` file has the ledger, and so has a checkpoint.

        A `.weights.h5` file takes the place of another as a whole: a crash leaves the one or the other.
        """
        name = str(filepath)
        _warn_without_ledger(filepath, name.endswith(".weights.h5") or not name.endswith((".h5", ".hdf5")))
        if not name.endswith(".weights.h5") or "://" in name or not overwrite or args or kwargs:
            return super().save_weights(filepath, overwrite, *args, **kwargs)
        with _whole_file(name) as part:
            return super().save_weights(part)

    def load_weights(self, filepath, *args, **kwargs):
        """Loads the weights as in Keras, and their ledger.

        Raises:
            OSError: for a file that is torn or damaged.
        """
        try:
            return super().load_weights(filepath, *args, **kwargs)
        except OSError as error:
            if error.errno is not None:
                raise  # There is no such file, or no permission.
            raise OSError(
                "A file of weights must be whole: restore it, or remove it and train anew. Received: "
                f"{str(filepath)!r} ({error})"
            ) from error

    def save_own_variables(self, store):
        """Saves what Keras does, and the ledger beside it."""
        super().save_own_variables(store)
        file, ledger = _keras.h5_file(store), self.ledger
        if file is None:
            return
        if LEDGER_NAME in file:  # Of another private model that is saved in the same file.
            ledger = ledger.joined(_saved_ledger(file))
            del file[LEDGER_NAME]
        document = np.frombuffer(ledger.to_json().encode(), np.uint8)
        file.create_dataset(LEDGER_NAME, data=document, fletcher32=True)  # HDF5 then finds damage itself.

    def load_own_variables(self, store):
        """Loads what Keras does, and the ledger if the file has one."""
        super().load_own_variables(store)
        file = _keras.h5_file(store)
        if file is not None and LEDGER_NAME in file:
            self.account().take_over(_saved_ledger(file))


class _LedgerState(tf.train.experimental.PythonState):
    """Takes the ledger into TensorFlow's checkpoints."""

    def __init__(self, account):
        self._account = account

    def serialize(self):
        return self._account.current().ledger.to_json()

    def deserialize(self, document):
        self._account.current().take_over(Ledger.from_json(tf.compat.as_str(document)))


def _saved_ledger(file):
    try:
        return Ledger.from_json(bytes(np.asarray(file[LEDGER_NAME])).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            "The ledger in this file is damaged, and cannot be trusted to count what the weights have cost: "
            f"restore the file. ({error})"
        ) from error


@contextlib.contextmanager
def _whole_file(path):
    """A name to write to, whose file takes the place of `path` when all of it is on disk."""
    path = os.path.realpath(path)
    part = os.path.join(os.path.dirname(path), f"part.{os.path.basename(path)}")
    try:
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)


def _warn_without_ledger(path, has_ledger):
    if not has_ledger:
        warnings.warn(
            "This format has no room for the ledger: a model loaded from it does not know what its weights "
            f"have cost. Save it as `.keras`, or its weights as `.weights.h5`. Received: {path}",
            stacklevel=3,
        )


def _bound(model, args, kwargs):
    """The arguments of Keras's `fit` by name, with its defaults."""
    bound = inspect.signature(keras.Model.fit).bind(model, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    arguments.pop("self")
    return arguments


def _budget(callbacks, plan):
    """The `PrivacyBudget` among the callbacks, as terms; without one, no limit."""
    budgets = [callback for callback in _listed(callbacks) if isinstance(callback, PrivacyBudget)]
    if len(budgets) > 1:
        raise ValueError(f"`callbacks` must have one PrivacyBudget at most. Received: {len(budgets)} of them")
    if budgets:
        return budgets[0].terms(plan.sampling.dataset_size)
    return Budget(accounting.default_delta(plan.sampling.dataset_size))


def _listed(callbacks):
    """What `fit` was given as callbacks, as a list."""
    return tf.nest.flatten(getattr(callbacks, "callbacks", callbacks) or [])


@contextlib.contextmanager
def _callbacks_with(first, callbacks, model):
    """The user's callbacks, with ours before them: they find epsilon in the logs. It resumes after them."""
    last = keras.callbacks.LambdaCallback(on_train_begin=first.resume)
    if not hasattr(callbacks, "callbacks"):
        yield [first, *_listed(callbacks), last]
        return
    first.set_model(model)  # A CallbackList has told its own of the model when it was made.
    theirs = callbacks.callbacks
    callbacks.callbacks = [first, *theirs, last]
    try:
        yield callbacks
    finally:
        callbacks.callbacks = theirs


def _calibrated(plan, budget, ledger, optimizer):
    """The least noise multiplier with which the fit stays within the budget."""
    if budget.epsilon is None:
        raise ValueError(
            '`callbacks` must have a PrivacyBudget for `noise_multiplier="auto"`, which is calibrated to it. '
            "Received: none"
        )

    def cost(sigma):
        mechanism = optimizer.mechanism_with(sigma)
        return budget.spent(ledger.merged([plan.entry(mechanism)]))

    return calibration.least_noise(cost, budget.epsilon)


def _declared(sampling, dataset_size, max_batch_size, optimizer):
    """The sampling that a caller of `train_on_batch` declares, or None."""
    if sampling is dataset_size is max_batch_size is None:
        return None
    if sampling != "poisson" or dataset_size is None or optimizer.expected_batch_size is None:
        raise ValueError(
            '`sampling="poisson"` must come with `dataset_size`, and with `expected_batch_size` in the '
            f"optimizer. Received: sampling={sampling!r}, dataset_size={dataset_size}, "
            f"expected_batch_size={optimizer.expected_batch_size}"
        )
    return PoissonSampling(dataset_size, optimizer.expected_batch_size, max_batch_size, own_data=True)
