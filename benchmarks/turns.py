"""A contender's side of the conversation: wait for a turn, run some steps, say how long they took.

    contender: "ready"          after it has compiled and warmed up
    runner:    "go"             contender runs epochs of STEPS steps, and prints {"seconds": ...} of a step
    runner:    "end"            contender prints {"peak_mb": ...} and ends

Every contender of a workload is alive at once, and only one has its turn. While it waited, the machine may
have taken its memory or caches, which the untimed steps at the start of an epoch bring back. A turn has as
many epochs as half a second takes.

Warm is after 160 steps, or, where those are slow, after five seconds: TensorFlow hands each operation to
another thread until it has seen about a hundred times that it is short.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

STEPS = int(os.environ.get("BENCH_STEPS", "20"))
UNTIMED = STEPS // 4
WARM_STEPS, WARM_SECONDS = 160, 5.0
TURN_SECONDS = 0.5


def tell(**facts) -> None:
    """Prints a line for the runner."""
    print("BENCH " + json.dumps(facts), flush=True)


def wait() -> bool:
    """Blocks until it is this process's turn; False if there is none left."""
    return sys.stdin.readline().strip() == "go"


def peak_mb() -> float:
    """The most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Turns:
    """Epochs that warm up, then epochs in turns."""

    def __init__(self):
        self._epochs, self._compiled, self._turn = 0, None, None

    def may_begin(self) -> bool:
        """Whether to run one more epoch; waits for a turn unless one has begun."""
        if not self._is_warm() or self._turn:
            return True
        if self._turn is None:
            tell(ready=True)
        self._turn = []
        if wait():
            return True
        tell(peak_mb=peak_mb())
        return False

    def ended(self, seconds: float) -> None:
        """Notes an epoch, of whose timed steps each took so long."""
        self._epochs += 1
        self._compiled = self._compiled or time.perf_counter()
        if self._turn is not None:
            self._turn.append(seconds)
            if sum(self._turn) * (STEPS - UNTIMED) >= TURN_SECONDS:
                tell(seconds=sum(self._turn) / len(self._turn))
                self._turn = []

    def _is_warm(self):
        slow = self._epochs >= 2 and time.perf_counter() - self._compiled >= WARM_SECONDS
        return slow or self._epochs * STEPS >= WARM_STEPS


def serve(step) -> None:
    """Takes turns until the runner ends them; for contenders with a loop of their own.

    Args:
        step: runs the i-th step, to its end.
    """
    turns = Turns()
    while turns.may_begin():
        for i in range(UNTIMED):
            step(i)
        start = time.perf_counter()
        for i in range(UNTIMED, STEPS):
            step(i)
        turns.ended((time.perf_counter() - start) / (STEPS - UNTIMED))
