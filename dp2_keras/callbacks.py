"""Epsilon in the training loop: in the log of each epoch, and as a limit.

    log       epsilon(all steps so far), after each epoch
    limit     the most steps k of the coming epoch with  epsilon(steps so far + k) <= budget

Both are free of data: epsilon depends on n, the batch size, sigma and the number of steps. The limit
is checked by the step itself, in the graph; see `meter.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from dp2_keras import _checks, _keras, accounting
from dp2_keras.account import Account, Budget
from dp2_keras.fitting import Plan
from dp2_keras.meter import UNLIMITED


class PrivacyBudget(_keras.keras.callbacks.Callback):
    """Stops training *before* the step that would spend more than epsilon.

    Everything that the model's ledger holds counts, not this fit alone. A fit that cannot make one step is
    refused. With `noise_multiplier="auto"` in the optimizer, `fit` chooses the least noise with which
    all its epochs fit into the budget.

    Args:
        epsilon: the most that may be spent, greater than 0.
        delta: above 0 and below 1. Defaults to the largest power of ten that is at most 1 / n.
        accountant: "rdp" (what TF Privacy uses) or "pld" (tighter, slower).
        neighbors: "add_remove" (the default) or "replace_one".

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> budget = PrivacyBudget(epsilon=3.0, delta=1e-5)
    >>> budget.epsilon
    3.0
    """

    def __init__(
        self,
        epsilon: float,
        delta: float | None = None,
        *,
        accountant: str = "rdp",
        neighbors: str = "add_remove",
    ):
        super().__init__()
        _checks.positive(epsilon=epsilon)
        if delta is not None:
            _checks.open_unit(delta=delta)
        _checks.one_of(("rdp", "pld"), accountant=accountant)
        _checks.one_of(("add_remove", "replace_one"), neighbors=neighbors)
        self.epsilon = float(epsilon)
        self.delta = delta
        self.accountant = accountant
        self.neighbors = neighbors

    def terms(self, dataset_size: int) -> Budget:
        """The budget for n examples."""
        delta = accounting.default_delta(dataset_size) if self.delta is None else self.delta
        return Budget(delta, self.epsilon, self.accountant, self.neighbors)

    def on_train_begin(self, logs=None):
        """Refuses a model that keeps no ledger."""
        if not hasattr(self.model, "privacy_spent"):
            raise ValueError(
                "PrivacyBudget needs a model that keeps a ledger: wrap it with "
                f"`dp2_keras.make_private(model)`. Received: {type(self.model).__name__}"
            )


class FitAccount(_keras.keras.callbacks.Callback):
    """Opens a run for each epoch, logs epsilon, stops at the budget. `fit` adds it, first of all.

    Args:
        account: the model's.
        plan: what the fit does.
        budget: what may be spent, and how it is priced.
        callbacks: the user's, among which a backup may be.
    """

    def __init__(self, account: Account, plan: Plan, budget: Budget, callbacks: Iterable = ()):
        super().__init__()
        self._account, self._plan, self._budget = account, plan, budget
        self._backups = _keras.Backups(callbacks)
        self._first_step = None
        self._is_cut = self._rate_started = False
        self._passed = 0

    def set_model(self, model):
        """Notes where the fit starts, before a callback can restore an interrupted one."""
        super().set_model(model)
        if self._first_step is None:
            self._first_step = int(model.optimizer.iterations.numpy())

    def on_train_begin(self, logs=None):
        """Looks at what an interrupted fit has left, before a callback restores it."""
        self._backups.prepare(self.model)

    def resume(self, logs=None):
        """Goes on with the epoch that the restored weights have come to; after all `on_train_begin`.

        Raises:
            ValueError: if it can be told neither by the backup nor by the weights.
        """
        steps, taken = self._plan.steps_per_epoch, self._steps_since_start()
        if not self._backups.are_restored:
            return
        if steps and taken > 0:
            self._backups.go_on(self.model, self._plan.arguments["initial_epoch"] + taken // steps)
        elif self._backups.without_epoch:
            raise ValueError(
                "A backup must tell which epoch comes next, and its `training_metadata.json` is torn or "
                "missing. Make the model anew and give `steps_per_epoch` to `fit`, so that it follows from "
                "the steps of the weights; or remove the directory to start anew. Received: "
                f"steps_per_epoch={steps}, {', '.join(map(repr, self._backups.without_epoch))}"
            )

    def on_train_end(self, logs=None):
        """Lets the backup be deleted in an order that a kill does no harm to."""
        self._backups.end()

    def on_epoch_begin(self, epoch, logs=None):
        """Opens the epoch's run, with as many steps as the budget pays."""
        taken = self._steps_taken(epoch)
        self._passed = epoch * (self._plan.steps_per_epoch or 0) + taken
        if self._steps_since_start() and not self._rate_started:  # A backup was restored, with its history.
            self._settle_rate()
        self._open(self._plan.steps_per_epoch or UNLIMITED)
        self._account.meter.skip(taken)

    def on_train_batch_begin(self, batch, logs=None):
        """Opens the run anew where weights, and with them a history, were loaded in the midst of an epoch."""
        if not self._account.is_open:
            self._open(max((self._plan.steps_per_epoch or UNLIMITED) - batch, 1))
        if not self._rate_started:  # Only now is it known which step the fit goes on with.
            passed, optimizer = self._passed + batch, self.model.optimizer
            optimizer.start_rate(int(optimizer.iterations.numpy()) - passed)
            self._rate_started = True

    def _settle_rate(self):
        optimizer, ledger = self.model.optimizer, self._account.ledger
        paid = self._plan.paid_steps(self._budget, ledger, optimizer.mechanism(), self._passed)
        optimizer.settle_rate(paid)

    def _open(self, planned):
        optimizer, sampling, ledger = self.model.optimizer, self._plan.sampling, self._account.ledger
        self._budget.check(ledger, optimizer.mechanism(), sampling)
        paid = self._budget.allowed_steps(ledger, optimizer.mechanism(), sampling, planned)
        self._is_cut = paid < planned
        self._account.open(optimizer, sampling, paid)

    def _steps_taken(self, epoch):
        """Steps of this epoch that a restored run has taken; Keras 3 starts the epoch anew."""
        steps, first = self._plan.steps_per_epoch, self._plan.arguments["initial_epoch"]
        taken, before = self._steps_since_start(), (epoch - first) * (steps or 0)
        restarts = self._backups.are_restored and steps is not None and before < taken < before + steps
        return taken - before if restarts else 0

    def _steps_since_start(self):
        """Steps of the weights since the fit was called: those of the fit that it resumes, too."""
        return int(self.model.optimizer.iterations.numpy()) - self._first_step

    def on_train_batch_end(self, batch, logs=None):
        """Stops in the midst of an epoch, when the steps that were paid have run."""
        if self._is_cut and self._account.meter.is_exhausted:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        """Closes the run, logs epsilon, and stops if there is no step left for another epoch."""
        self._account.close()
        if logs is not None:
            logs["epsilon"] = self._budget.spent(self._account.ledger)
        mechanism = self.model.optimizer.mechanism()
        ledger, sampling = self._account.ledger, self._plan.sampling
        if not self._budget.allowed_steps(ledger, mechanism, sampling, upper=1):
            self.model.stop_training = True
