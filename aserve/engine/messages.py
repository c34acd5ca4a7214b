"""What crosses between the event loop and the step thread: commands down, reports and life signs up.

Plain values without behaviour, so that either side can be tested without the other. Written by the local client and
the step loop, carried by the bridge.
"""

from __future__ import annotations

from typing import NamedTuple

from aserve.core.capacity import Capacity
from aserve.core.request import Request, RequestId
from aserve.core.step import TokenEvent
from aserve.scheduler import SchedulerStats


class Submit(NamedTuple):
    """Add these sequences; all of one user's request, already checked against the capacity."""

    requests: tuple[Request, ...]


class Cancel(NamedTuple):
    """End these sequences, in whatever state they are."""

    request_ids: tuple[RequestId, ...]


class Stop(NamedTuple):
    """End the loop and close the executor."""


Command = Submit | Cancel | Stop


class StepReport(NamedTuple):
    """Everything one turn of the step loop has to tell.

    Attributes:
        events: tokens, in plan order; empty when only the numbers changed.
        admitted: sequences that began, or resumed, running.
        scheduler: the scheduler's numbers after this turn.
        num_commands: commands applied since the start; the numbers include the effect of exactly these.
        num_steps: steps committed since the start.
        busy_s: seconds the thread was not asleep for want of work, since the start.
        wait_s: the part of ``busy_s`` spent in ``executor.wait``.
    """

    events: tuple[TokenEvent, ...]
    admitted: tuple[RequestId, ...]
    scheduler: SchedulerStats
    num_commands: int
    num_steps: int
    busy_s: float
    wait_s: float

    @property
    def is_empty(self) -> bool:
        """Whether the scheduler held nothing any more."""
        stats = self.scheduler
        return not (stats.num_running or stats.num_waiting or stats.num_used_blocks)


class Loaded(NamedTuple):
    """The executor is there and the loop begins."""

    capacity: Capacity


class Failed(NamedTuple):
    """Loading or a step raised this; the loop is over."""

    error: BaseException


class Stopped(NamedTuple):
    """The executor is closed; the thread is about to end. The last message."""


LifeSign = Loaded | Failed | Stopped
Message = StepReport | LifeSign
