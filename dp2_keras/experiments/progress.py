"""A bar with the time that is left.

    left = time so far / work so far * work to do

the work of a run being its steps, larger batches counting for more. On a terminal the line is written over;
elsewhere there is a new one every half minute.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 24


class Progress:
    """Counts runs. Use it in a `with` statement.

    Args:
        runs: how many there are.
        work: how much work they are together.
        stream: where to write. Defaults to stderr.
        clock: tells the time in seconds. Defaults to the monotonic clock.
    """

    def __init__(self, runs: int, work: float, stream: TextIO | None = None, clock=time.monotonic):
        self._runs, self._work = runs, work
        self._stream, self._clock = stream or sys.stderr, clock
        self._done = self._failed = 0
        self._worked, self._started, self._shown = 0.0, clock(), -1e9

    def add(self, work: float, failed: bool = False) -> None:
        """One run more is done."""
        self._done += 1
        self._failed += failed
        self._worked += work
        self.show()

    def line(self) -> str:
        """The bar in words."""
        filled = round(_WIDTH * self._worked / self._work) if self._work else _WIDTH
        failed = f", {self._failed} failed" if self._failed else ""
        left = f", {duration(self._left())} left" if 0 < self._worked < self._work else ""
        return f"[{'#' * filled:-<{_WIDTH}}] {self._done}/{self._runs} runs{failed}{left}"

    def show(self, force: bool = False) -> None:
        """Writes the line, unless it was written just now."""
        terminal = self._stream.isatty()
        if not force and self._clock() - self._shown < (0.2 if terminal else 30.0):
            return
        self._shown = self._clock()
        self._stream.write(f"\r\033[K{self.line()}" if terminal else f"{self.line()}\n")
        self._stream.flush()

    def _left(self):
        return (self._clock() - self._started) * (self._work / self._worked - 1.0)

    def __enter__(self):
        if self._runs:
            self.show(force=True)
        return self

    def __exit__(self, *exception):
        if self._runs:
            self.show(force=True)
            if self._stream.isatty():
                self._stream.write("\n")


def duration(seconds: float) -> str:
    """A length of time in words.

    Example:
    >>> duration(42), duration(200), duration(8000)
    ('42 s', '3 min 20 s', '2 h 13 min')
    """
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
