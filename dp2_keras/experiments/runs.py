"""One run, and its name.

    key = first 16 hex digits of SHA-256(the run as JSON, keys sorted, 5.0 spelled 5)

Whatever changes the row changes the key; where the data lies and which version runs do not. A file of rows
by key is all that a sweep needs to go on where it was stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from dp2_keras import _checks


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a row depends on.

    Args:
        task: a name in `tasks.TASKS`.
        method: a name in `methods.METHODS`.
        hyper: the method's hyper-parameters by name.
        seed: of the weights, the batches and the noise.
        epochs: passes over the data; one is n // batch_size steps.
        batch_size: the expected size of a Poisson batch.
        noise_multiplier: sigma; 0 for methods that are not private.
        evaluations: how often train and test metrics are taken, at most; the last is at the end.
        probes: names in `probes.PROBES` of what else is measured.

    Raises:
        ValueError: for a value out of range.

    Example:
    >>> run = Run("imdb", "DPSGD", {"learning_rate": 5.0, "l2_norm_clip": 0.5}, 0, 100, 64, 1.0)
    >>> run.key == dataclasses.replace(run, hyper={"l2_norm_clip": 0.5, "learning_rate": 5}).key
    True
    >>> run.key == dataclasses.replace(run, seed=1).key
    False
    """

    task: str
    method: str
    hyper: dict[str, Any]
    seed: int
    epochs: int
    batch_size: int
    noise_multiplier: float
    evaluations: int = 1
    probes: tuple[str, ...] = ()

    def __post_init__(self):
        _checks.positive_integer(epochs=self.epochs, batch_size=self.batch_size, evaluations=self.evaluations)
        _checks.non_negative_integer(seed=self.seed)
        _checks.non_negative(noise_multiplier=self.noise_multiplier)
        object.__setattr__(self, "hyper", _canonical(dict(self.hyper)))
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))
        object.__setattr__(self, "probes", tuple(self.probes))

    @property
    def key(self) -> str:
        """The run's name."""
        text = json.dumps(_canonical(self.as_dict()), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def points(self) -> int:
        """How many evaluations there are: the most that divide the epochs."""
        return max(k for k in range(1, self.evaluations + 1) if self.epochs % k == 0)

    def as_dict(self) -> dict[str, Any]:
        """The run as JSON has it."""
        return {**dataclasses.asdict(self), "probes": list(self.probes)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Run:
        """The run that a row was made by; what else the row holds is passed over."""
        return cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})

    def __hash__(self):
        return hash(self.key)


def _canonical(value):
    """Whole numbers as integers, in whatever they are nested."""
    if isinstance(value, dict):
        return {name: _canonical(part) for name, part in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_canonical(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
