"""A contender's side of the conversation: wait for a turn, run some steps, say how long they took.

    contender: "ready"          after it has compiled and warmed up
    runner:    "go"             contender runs its steps, the first ones untimed, and prints {"seconds": ...}
    runner:    "end"            contender prints {"peak_mb": ...} and ends

Every contender of a workload is alive at once, and only one has its turn. While it waited, the machine may
have taken its memory or caches, which the untimed steps bring back.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

STEPS = int(os.environ.get("BENCH_STEPS", "20"))
UNTIMED = STEPS // 4


def tell(**facts) -> None:
    """Prints a line for the runner."""
    print("BENCH " + json.dumps(facts), flush=True)


def wait() -> bool:
    """Blocks until it is this process's turn; False if there is none left."""
    return sys.stdin.readline().strip() == "go"


def peak_mb() -> float:
    """The most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(step, warmup: int = 3) -> None:
    """Takes turns until the runner ends them; for contenders with a loop of their own.

    Args:
        step: runs the i-th step, to its end.
        warmup: how many steps compile and fill caches.
    """
    for i in range(warmup):
        step(i)
    tell(ready=True)
    while wait():
        for i in range(UNTIMED):
            step(i)
        start = time.perf_counter()
        for i in range(UNTIMED, STEPS):
            step(i)
        tell(seconds=(time.perf_counter() - start) / (STEPS - UNTIMED))
    tell(peak_mb=peak_mb())
