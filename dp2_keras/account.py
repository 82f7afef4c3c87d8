"""The account of one model: what its weights have cost, and what they may still cost.

    a run          steps of one mechanism under one sampling: an epoch of `fit`, a `train_on_batch`
    spent          ledger + (mechanism, sampling) x steps of the open run, which the meter counts
    limit          the most steps with  epsilon(spent) <= budget

A step outside of any run that is known is counted as one unamplified Gaussian. With a ledger file, the
steps of a run are written there before they may run, so that no crash forgets one.
"""

from __future__ import annotations

import dataclasses

from dp2_keras.errors import BudgetExhaustedError
from dp2_keras.ledger import Ledger, Mechanism, UnknownSampling
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
            raise BudgetExhaustedError(
                f"The privacy budget must pay for one step at least: {self.spent(ledger):.6g} of epsilon="
                f"{self.epsilon} (delta={self.delta}) is spent after {ledger.steps:,} steps, and one more "
                "would exceed it. Stop here, or train a new model on other data."
            )


class Account:
    """Ledger, meter and, if there is one, ledger file of a model.

    Example:
    >>> account = Account()
    >>> account.idle(Mechanism("DPSGD", (1.0,), (1.0,)))
    >>> _ = account.meter.count()
    >>> account.ledger.steps
    1
    """

    def __init__(self, ledger: Ledger | None = None):
        self.meter = Meter()
        self._ledger = ledger or Ledger()
        self._is_open, self._idle_mechanism = False, None
        self._file = None

    @property
    def ledger(self) -> Ledger:
        """All steps so far, those of the open run too."""
        if self._is_open:
            self._ledger.advance(self.meter.steps)
        return self._ledger

    @property
    def has_file(self) -> bool:
        """Whether steps are written ahead."""
        return self._file is not None

    def open(self, mechanism: Mechanism, sampling, steps: int = UNLIMITED) -> None:
        """Starts a run of at most `steps` steps, after which the gate closes."""
        self.close()
        if self.has_file:
            self._file.reserve(mechanism, sampling, steps)
        self._begin(mechanism, sampling, steps, stops_quietly=True)

    def idle(self, mechanism: Mechanism) -> None:
        """Between runs: a step that comes nevertheless counts in full, or is refused if there is a file."""
        self.close()
        self._begin(mechanism, UnknownSampling(), 0 if self.has_file else UNLIMITED, stops_quietly=False)

    def _begin(self, mechanism, sampling, steps, stops_quietly):
        self._ledger.begin(mechanism, sampling)
        self._is_open, self._idle_mechanism = True, None if stops_quietly else mechanism
        self.meter.open(steps, stops_quietly)

    def close(self) -> None:
        """Ends the open run and keeps what it took."""
        if not self._is_open:
            return
        self._ledger.advance(self.meter.steps)
        self._ledger.close()
        self._is_open, self._idle_mechanism = False, None
        self.meter.close()
        if self.has_file:
            self._file.settle(self.meter.steps)

    def replace(self, ledger: Ledger) -> None:
        """Takes over the history of weights that were loaded; an epoch that is under way has no step left."""
        mechanism = self._idle_mechanism
        self.close()
        self._ledger = self._file.ledger.copy() if self.has_file else ledger.copy()
        if mechanism is not None:
            self.idle(mechanism)

    def use_file(self, path) -> None:
        """Writes all further steps ahead to a file, and takes over what the file has counted.

        Raises:
            ValueError: if the account writes to another file already.
        """
        if self._file is not None and self._file.path == path:
            return
        if self._file is not None:
            raise ValueError(
                "`ledger_file` must stay the one that the model has written to. Received: "
                f"ledger_file={str(path)!r}, after {str(self._file.path)!r}"
            )
        self.close()
        self._file = LedgerFile(path)
        self._file.add(self._ledger)
        self._ledger = self._file.ledger.copy()

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
