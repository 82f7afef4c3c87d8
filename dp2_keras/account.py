"""The account of one model: what its weights have cost, and what they may still cost.

    a run          steps of one mechanism under one sampling: an epoch of `fit`, a `train_on_batch`
    spent          ledger + (mechanism, sampling) x steps of the open run, which the meter counts
    limit          the most steps with  epsilon(spent) <= budget

A step outside of any run that is known is counted as one unamplified Gaussian. With a ledger file, the
steps of a run are written there before they may run, so that no crash forgets one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterable

from dp2_keras.entries import Entry, Mechanism, ShuffledSampling, UnknownSampling
from dp2_keras.errors import BudgetExhaustedError
from dp2_keras.ledger import Ledger
from dp2_keras.ledger_file import LedgerFile
from dp2_keras.meter import UNLIMITED, Meter


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much may be spent, and how it is priced.

    Attributes:
        delta: above 0 and below 1.
        epsilon: the most that may be spent, or None for no limit.
        accountant: "rdp" or "pld".
        neighbors: "add_remove" or "replace_one".
    """

    delta: float
    epsilon: float | None = None
    accountant: str = "rdp"
    neighbors: str = "add_remove"

    def spent(self, ledger: Ledger) -> float:
        """The price of a ledger."""
        return ledger.epsilon(self.delta, accountant=self.accountant, neighbors=self.neighbors)

    def allowed_steps(self, ledger: Ledger, mechanism: Mechanism, sampling, upper: int = UNLIMITED) -> int:
        """How many steps of a new run the budget pays."""
        if self.epsilon is None:
            return upper
        terms = dict(accountant=self.accountant, neighbors=self.neighbors, upper=upper)
        return ledger.allowed_steps(mechanism, sampling, self.epsilon, self.delta, **terms)

    def check(self, ledger: Ledger, mechanism: Mechanism, sampling) -> None:
        """Refuses a run that cannot make one step.

        Raises:
            BudgetExhaustedError: if the budget does not pay for one more step.
        """
        if self.allowed_steps(ledger, mechanism, sampling, upper=1) < 1:
            self._refuse(ledger)

    def check_remainder(self, ledger: Ledger) -> None:
        """Refuses to calibrate noise to a budget of which nothing is left.

        Raises:
            BudgetExhaustedError: if all of it is spent.
        """
        if self.epsilon is not None and ledger.steps and self.spent(ledger) >= self.epsilon:
            self._refuse(ledger)

    def _refuse(self, ledger):
        raise BudgetExhaustedError(
            f"The privacy budget must pay for one step at least: {self.spent(ledger):.6g} of epsilon="
            f"{self.epsilon} (delta={self.delta}) is spent after {ledger.steps:,} steps, and one more "
            "would exceed it. Stop here, or train a new model on other data."
        )


class Account:
    """Ledger, meter and, if there is one, ledger file of a model.

    Example:
    >>> import dp2_keras as dp2
    >>> account = Account()
    >>> account.idle(dp2.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0))
    >>> _ = account.meter.count()
    >>> account.ledger.steps
    1
    """

    def __init__(self, ledger: Ledger | None = None):
        self.meter = Meter()
        self.is_open = False
        self._origin = secrets.token_hex(8)
        self._ledger = self._own(ledger or ())
        self._absorbed_by = None
        self._idle_for = None
        self._is_fitting = False
        self._file = None

    @property
    def ledger(self) -> Ledger:
        """All steps so far, those of the open run too."""
        if self.is_open:
            self._ledger.advance(self.meter.steps)
        return self._ledger

    def _own(self, entries):
        """A ledger of these entries, whose further runs are this account's."""
        return Ledger(entries, self._origin)

    @property
    def has_file(self) -> bool:
        """Whether steps are written ahead."""
        return self._file is not None

    @contextlib.contextmanager
    def fitting(self):
        """Inside, only `fit` opens runs."""
        self.check_not_fitting("fit")
        self._is_fitting = True
        try:
            yield
        finally:
            self._is_fitting = False
            self.close()

    def check_not_fitting(self, method: str) -> None:
        """Refuses a method that would be counted as a part of the fit under way."""
        if self._is_fitting:
            raise RuntimeError(
                f"`{method}` must not be called while `fit` runs on the same weights: it would be counted "
                "as a part of it. Call it between fits."
            )

    def open(self, optimizer, sampling, steps: int = UNLIMITED) -> None:
        """Starts a run of at most `steps` steps, after which the gate closes."""
        self.close()
        if self.has_file:
            self._file.reserve(optimizer.mechanism(), sampling, steps, self._origin)
        bounded = isinstance(sampling, ShuffledSampling) and sampling.own_data
        self._begin(optimizer, sampling)
        self.meter.open(
            steps,
            ticket=optimizer.ticket,
            largest_batch=sampling.batch_size if bounded else UNLIMITED,
            one_pass=sampling.one_pass if bounded else None,
            in_loop=True,
        )

    def idle(self, optimizer) -> None:
        """Between runs: a step that comes nevertheless counts in full, or is refused if there is a file."""
        if self._is_fitting or self._idle_for is optimizer:
            return
        self.close()
        self._begin(optimizer, UnknownSampling())
        self._idle_for = optimizer
        self.meter.open(0 if self.has_file else UNLIMITED, ticket=optimizer.ticket)

    def _begin(self, optimizer, sampling):
        self._ledger.begin(optimizer.mechanism(), sampling)
        self.is_open = True

    def close(self) -> None:
        """Ends the open run and keeps what it took."""
        self._idle_for = None
        if not self.is_open:
            return
        self._ledger.advance(self.meter.steps)
        self._ledger.close()
        self.is_open = False
        self.meter.close()
        if self.has_file:
            self._file.settle(self.meter.steps)

    def take_over(self, ledger: Ledger) -> None:
        """Adds the history of weights that were loaded, as far as it is not counted here already.

        Nothing is forgotten: what was not loaded, such as the optimizer's state, may still hold it.
        """
        optimizer = self._idle_for
        self.close()
        self._ledger = self._own(ledger.joined(self._ledger))
        if self.has_file:
            self._file.add(self._ledger)
            self._ledger = self._own(self._file.ledger)
        if optimizer is not None:
            self.idle(optimizer)

    def current(self) -> Account:
        """This account, or the one that it has become a part of."""
        return self if self._absorbed_by is None else self._absorbed_by.current()

    def absorb(self, other: Account) -> None:
        """Becomes the account of another one's weights too, for good.

        Raises:
            ValueError: if the other one writes to a ledger file, which two accounts cannot share.
            RuntimeError: while either fits.
        """
        for account in (self, other):
            account.check_not_fitting("account")
        if other.has_file:
            raise ValueError(
                "A model that shares layers must release its ledger file first, so that one account counts "
                "for all: call `release_ledger_file()` on it."
            )
        self.take_over(other.ledger)
        other.close()
        other.meter.close()
        other._absorbed_by = self

    def use_file(self, path) -> None:
        """Writes all further steps ahead to a file, and takes over what the file has counted.

        Raises:
            ValueError: if the account writes to another file already.
        """
        path = os.path.abspath(path)
        if self.has_file and self._file.path == path:
            return
        if self.has_file:
            raise ValueError(
                "`ledger_file` must stay the one that the model has written to. Received: "
                f"ledger_file={str(path)!r}, after {str(self._file.path)!r}"
            )
        self.close()
        self._file = LedgerFile(path)
        self._file.add(self._ledger)
        self._ledger = self._own(self._file.ledger)

    def release_file(self) -> None:
        """Closes the ledger file, so that another model can use it. Further steps are not written to it."""
        self.close()
        if self.has_file:
            self._file.close()
            self._file = None

    def __deepcopy__(self, memo):  # A copy of the weights has their history, and takes steps of its own.
        return Account(self.ledger.copy())

    def __reduce__(self):
        return _of_json, (self.ledger.to_json(),)


def _of_json(document):
    return Account(Ledger.from_json(document))


# Models that share a layer share its history: their account is noted in the layers.
_NAME = "_dp2_keras_account"


def note_account(account: Account, layers: Iterable) -> None:
    """Notes in layers whose account counts their steps. (Keras does not track it, nor save it.)"""
    for layer in layers:
        object.__setattr__(layer, _NAME, account)


def noted_accounts(layers: Iterable) -> list[Account]:
    """The accounts that are noted in layers, each once."""
    noted = [vars(layer)[_NAME].current() for layer in layers if _NAME in vars(layer)]
    return list({id(account): account for account in noted}.values())


def plain_account(layers: Iterable, optimizer) -> Account:
    """The account of a plain model's layers, noted in them.

    A new one starts with the steps that the optimizer has taken before, in the process that saved it.
    """
    layers = list(layers)
    accounts = noted_accounts(layers)
    account = common_account(accounts)
    steps = 0 if accounts else int(optimizer.iterations.numpy())
    if steps:
        entry = Entry(optimizer.mechanism(), UnknownSampling(), steps, origin=secrets.token_hex(8))
        account.take_over(Ledger([entry]))
    note_account(account, layers)
    return account


def common_account(accounts: Iterable[Account]) -> Account:
    """One account for all of them, which they become parts of; a new one for none."""
    first, *others = list({id(a.current()): a.current() for a in accounts}.values()) or [Account()]
    for other in others:
        first.absorb(other)
    return first
