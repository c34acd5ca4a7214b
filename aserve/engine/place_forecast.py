"""When a request that comes now would begin to run: what a queue with a limit in seconds is judged by.

A queue bounded by a number alone makes its last one wait for anything from one step to the longest answer that runs, as
answers that began together end together. So the ends are foreseen one by one: each sequence has its ``max_tokens``, of
which answers of late have used a certain share, and a step takes what steps of late have taken. Those ahead in the
queue take the places that become free first. Belongs to the local client; knows no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from aserve.engine.mailbox import Mailbox
from aserve.engine.messages import StepReport

_SMOOTHING = 0.1  # weight of the newest answer, or of the newest stretch of steps
_MIN_STEPS = 4  # of a stretch: fewer say little
_SLACK = 64  # entries of requests that have ended, before they are looked through


class _Course(NamedTuple):
    """A request that was let in: its choices and how long each may become."""

    num_choices: int
    max_tokens: int


class PlaceForecast:
    """Follows the requests that were let in, by mailbox, in the order of their coming."""

    def __init__(self) -> None:
        self._courses: dict[Mailbox, _Course] = {}
        self._share: float | None = None
        self._step_s: float | None = None
        self._num_steps = 0
        self._busy_s = 0.0

    def enter(self, mailbox: Mailbox, *, num_choices: int, max_tokens: int, num_unfinished: int) -> None:
        """Follow a request until its mailbox has no sequence any more; ``num_unfinished`` sequences have one."""
        if len(self._courses) > num_unfinished + _SLACK:
            self._learn()
        self._courses[mailbox] = _Course(num_choices, max_tokens)

    def wait_s(self, report: StepReport, *, num_places: int, num_new: int, num_unknown: int) -> float:
        """Seconds until the last of ``num_new`` sequences would run; 0 as long as too little has been seen to tell.

        Args:
            num_places: sequences that can run at once.
            num_unknown: sequences ahead of the new ones that have not been let in yet.
        """
        self._learn()
        self._measure(report)
        if self._share is None or self._step_s is None:
            return 0.0
        ends = sorted(self._running())
        ends = [0.0] * max(0, num_places - len(ends)) + ends
        if not ends:
            return 0.0
        heapify(ends)
        waiting = list(self._waiting())
        usual = sum(waiting) / len(waiting) if waiting else ends[-1]
        for steps in [*waiting, *[usual] * num_unknown]:
            heapreplace(ends, ends[0] + steps)
        begin = 0.0
        for _ in range(num_new):
            begin = heappop(ends)
            heappush(ends, begin + usual)
        return begin * self._step_s

    def _running(self) -> Iterator[float]:
        """Steps that each sequence which has begun still needs."""
        for mailbox, course in self._courses.items():
            if mailbox.admitted_s is not None:
                num_done = mailbox.num_events / course.num_choices
                yield from [max(1.0, self._steps_of(course) - num_done)] * mailbox.num_registered

    def _waiting(self) -> Iterator[float]:
        """Steps that each sequence which has not begun will need, in their order."""
        for mailbox, course in self._courses.items():
            if mailbox.admitted_s is None:
                yield from [self._steps_of(course)] * mailbox.num_registered

    def _steps_of(self, course: _Course) -> float:
        return max(1.0, course.max_tokens * (self._share or 1.0))

    def _learn(self) -> None:
        """Forget what has ended; what ended by itself tells how much of its limit an answer uses."""
        ended = [mailbox for mailbox in self._courses if not mailbox.num_registered]
        for mailbox in ended:
            course = self._courses.pop(mailbox)
            if mailbox.error is None and mailbox.num_events and course.max_tokens > 1:  # one is all of one
                share = min(1.0, mailbox.num_events / (course.num_choices * course.max_tokens))
                self._share = _smoothed(self._share, share)

    def _measure(self, report: StepReport) -> None:
        num_steps = report.num_steps - self._num_steps
        if num_steps >= _MIN_STEPS:
            self._step_s = _smoothed(self._step_s, (report.busy_s - self._busy_s) / num_steps)
            self._num_steps, self._busy_s = report.num_steps, report.busy_s


def _smoothed(before: float | None, value: float) -> float:
    return value if before is None else before + _SMOOTHING * (value - before)
