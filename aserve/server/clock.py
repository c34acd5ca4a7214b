"""The server's clock, which does not count the time in which the process was stopped.

After SIGSTOP and SIGCONT, a frozen container or a suspended machine, every timer of an ordinary clock has run out at
once: clients that did nothing wrong would count as stalled, idle and late together. Here time in which the event loop
did not run although it should have is left out. The wall clock plays no part: setting it changes nothing.
Given to ``trio.run`` by ``serve``; knows only trio.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

TOLERANCE_S = 1.0


class RunningClock(trio.abc.Clock):
    """Seconds in which the loop ran or had agreed to sleep.

    Args:
        source: The clock underneath.

    Attributes:
        stopped_s: what was left out so far.
    """

    def __init__(self, source: Callable[[], float] = time.perf_counter) -> None:
        self._source = source
        self._seen = source()
        self._sleep_s = 0.0
        self.stopped_s = 0.0

    def start_clock(self) -> None:
        self._seen = self._source()

    def current_time(self) -> float:
        now = self._source()
        missed = now - self._seen - self._sleep_s
        if missed > TOLERANCE_S:
            self.stopped_s += missed
        self._seen, self._sleep_s = now, 0.0
        return now - self.stopped_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        sleep_s = deadline - self.current_time()
        self._sleep_s = max(sleep_s, 0.0)
        return sleep_s
