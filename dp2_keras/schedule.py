"""When a step is an SGD step, when it is adaptive, and when to refresh.

With cycle = s1 + s2 and p = t mod cycle (Algorithm 1 of arXiv:2212.00309):

    p <  s1     : SGD phase       (D = 1; the private gradient is accumulated)
    p == s1 - 1 : refresh         (v <- rule(v, G / s1); G <- 0), after the step
    p >= s1     : ADAPTIVE phase  (D = sqrt(v) + eps)

The paper refreshes before step p == s1. After the step before is the same moment, and
leaves every change of state at the end of a step.

Steps may be Python integers or integer tensors; the answers are of the same kind.
"""

import dataclasses
import enum

from dp2_keras import _checks


class Phase(enum.IntEnum):
    """The two phases of a cycle; the value is what the `phase` metric logs."""

    SGD = 0
    ADAPTIVE = 1


@dataclasses.dataclass(frozen=True)
class DelayedSchedule:
    """`sgd_steps` SGD steps, then `adaptive_steps` adaptive ones, and again.

    Args:
        sgd_steps: s1, the number of steps whose mean refreshes the preconditioner.
        adaptive_steps: s2, the number of steps that use it.

    Raises:
        ValueError: if either is not a positive integer.

    Example:
    >>> schedule = DelayedSchedule(sgd_steps=2, adaptive_steps=1)
    >>> [bool(schedule.is_adaptive(t)) for t in range(4)]
    [False, False, True, False]
    """

    sgd_steps: int
    adaptive_steps: int

    def __post_init__(self):
        _checks.positive_integer(sgd_steps=self.sgd_steps, adaptive_steps=self.adaptive_steps)

    def _position(self, step):
        return step % (self.sgd_steps + self.adaptive_steps)

    def is_adaptive(self, step):
        """Whether step `step` (from 0) belongs to the adaptive phase."""
        return self._position(step) >= self.sgd_steps

    def refreshes(self, step):
        """Whether step `step` ends with a refresh: the last of an SGD phase does."""
        return self._position(step) == self.sgd_steps - 1


@dataclasses.dataclass(frozen=True)
class ConstantSchedule:
    """One phase for ever: DP-SGD (`SGD`) or a non-delayed method (`ADAPTIVE`)."""

    phase: Phase

    def is_adaptive(self, step):
        """Whether step `step` belongs to the adaptive phase: the same for all."""
        del step
        return self.phase is Phase.ADAPTIVE
