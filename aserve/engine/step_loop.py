"""The body of the step thread: apply commands, plan, submit, wait, commit, publish; asleep when there is no work.

Knows neither threads nor event loops: it is given something to take commands from and something to publish to, so a
test can turn it by hand. Its whole life is ``run_steps``, an iterator that says before each move what that may block
on: a thread just runs it to its end, a simulation lets virtual time pass instead. Sole caller of the scheduler and of
the executor; every failure becomes exactly one ``Failed`` message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from enum import Enum
from typing import Protocol

from aserve.core.capacity import Capacity
from aserve.core.request import RequestId
from aserve.core.step import StepExecutor, TokenEvent
from aserve.engine.messages import Cancel, Command, Failed, Loaded, Message, StepReport, Stop, Stopped, Submit
from aserve.scheduler import Scheduler, check_idle

logger = logging.getLogger(__name__)


class Pause(Enum):
    """What the next move of the step loop may block on."""

    LOADING = "loading"
    COMMANDS = "commands"  # there is no work: until there is a command
    TURN = "turn"  # nothing, but the event loop may act between two turns
    DEVICE = "device"  # until the oldest step in flight is done


class TakeCommands(Protocol):
    """Where commands come from: everything there is; with ``block``, not before there is something."""

    def __call__(self, *, block: bool) -> list[Command]: ...


class StepLoop:
    """Keeps one executor busy with one scheduler's plans. ``turn`` is one round; ``run`` goes on until told to stop.

    A turn has two halves, ``begin`` and ``finish``: between them the thread waits for the device.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        take: TakeCommands,
        publish: Callable[[Message], None],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._max_in_flight = executor.capacity.max_in_flight
        self._take = take
        self._publish = publish
        self._clock = clock
        self._num_in_flight = 0
        self._idle = False
        self._admitted: tuple[RequestId, ...] = ()
        self._turn_started_s = 0.0
        self._num_commands = 0
        self._num_steps = 0
        self._busy_s = 0.0
        self._wait_s = 0.0

    def run(self) -> Generator[Pause]:
        while True:
            yield Pause.COMMANDS if self._idle else Pause.TURN
            if not self.begin():
                return
            if not self._idle:
                yield Pause.DEVICE
            self.finish()

    def turn(self) -> bool:
        """Do one round: at most one step is waited for. False when a stop was taken."""
        if not self.begin():
            return False
        self.finish()
        return True

    def begin(self) -> bool:
        """Apply the commands and submit steps; False when a stop was taken.

        Cancels take effect before the next plan, and a round with commands publishes the numbers before it waits.
        """
        commands = self._take(block=self._idle)
        self._turn_started_s = self._clock()
        if not self._apply(commands):
            return False
        self._admitted = self._fill()
        if commands:
            self._publish(self.report((), self._admitted))
            self._admitted = ()
        self._idle = self._num_in_flight == 0
        return True

    def finish(self) -> None:
        """Wait for the oldest step in flight, if there is one, and publish what it brought."""
        if not self._idle:
            self._publish(self.report(self._finish_step(), self._admitted))
        elif self._scheduler.has_work:
            raise RuntimeError("S7: there is work, nothing in flight, and no plan")
        else:
            check_idle(self._scheduler)
        self._busy_s += self._clock() - self._turn_started_s

    def report(self, events: tuple[TokenEvent, ...] = (), admitted: tuple[RequestId, ...] = ()) -> StepReport:
        """What is to be told now."""
        return StepReport(
            events, admitted, self._scheduler.stats(), self._num_commands, self._num_steps, self._busy_s, self._wait_s
        )

    def _apply(self, commands: list[Command]) -> bool:
        self._num_commands += len(commands)
        for command in commands:
            match command:
                case Submit(requests):
                    for request in requests:
                        self._scheduler.add(request)
                case Cancel(request_ids):
                    for request_id in request_ids:
                        self._scheduler.cancel(request_id)
                case Stop():
                    return False
        return True

    def _fill(self) -> tuple[RequestId, ...]:
        """Submit steps until enough are in flight; returns the sequences that these admit."""
        admitted: list[RequestId] = []
        while self._num_in_flight < self._max_in_flight:
            plan = self._scheduler.plan()
            if plan is None:
                break
            self._executor.submit(plan)
            self._num_in_flight += 1
            admitted += [row.request_id for row in plan.sequences if row.new is not None]
        return tuple(admitted)

    def _finish_step(self) -> tuple[TokenEvent, ...]:
        started_s = self._clock()
        result = self._executor.wait()
        self._wait_s += self._clock() - started_s
        self._num_in_flight -= 1
        self._num_steps += 1
        return self._scheduler.commit(result)


def run_steps(
    make_executor: Callable[[], StepExecutor],
    make_scheduler: Callable[[Capacity], Scheduler],
    *,
    take: TakeCommands,
    publish: Callable[[Message], None],
    clock: Callable[[], float],
) -> Generator[Pause]:
    """Load, loop until a stop, close; the whole life of the step thread, to be iterated to its end. Never raises.

    Publishes ``Loaded`` once the executor is there, ``Failed`` once if anything raises, and ``Stopped`` last. A
    failure while loading is for the caller to tell; one in the loop is logged here, where its traceback is whole.
    """
    yield Pause.LOADING
    try:
        executor = make_executor()
    except BaseException as error:
        publish(Failed(error))
        publish(Stopped())
        return
    try:
        loop = StepLoop(make_scheduler(executor.capacity), executor, take=take, publish=publish, clock=clock)
        publish(loop.report())
        publish(Loaded(executor.capacity))
        yield from loop.run()
    except GeneratorExit:  # given up between two moves: nobody listens any more
        executor.close()
        raise
    except BaseException as error:
        logger.error("the step loop failed; no request can be served any more", exc_info=error)
        publish(Failed(error))
    try:
        executor.close()
    except Exception:
        logger.exception("closing the executor failed")
    publish(Stopped())
