"""One seed's world: a program with its engine, its clients and its faults, and what has happened so far.

Everything runs in one trio loop on a virtual clock. Parts report to the world; the first violation ends it. Made by
the runner.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from aserve.core.step import StepPlan
from aserve.engine.engine import Engine
from aserve.scheduler import Scheduler
from tests.simulation.clients import run_client
from tests.simulation.connection import SimulatedServer
from tests.simulation.determinism import Chance, VirtualClock, WallClock
from tests.simulation.host import SimulatedHost
from tests.simulation.invariants import Observer
from tests.simulation.model import SimulatedExecutor
from tests.simulation.programs import EmbeddingProgram, ProcessEnded, ServerProcess
from tests.simulation.scenario import Scenario

HORIZON_S = 600.0
"""Virtual seconds that any request takes at most, whatever happens to it."""


class World:
    """See the module.

    Attributes:
        violation: what went wrong first.
        events: what has happened, in order.
        is_over: set when the process was killed, or a violation found: nothing counts any more.
        loaded_s, failed_s, stopping_s: when the model was there, a step raised, the program was told to stop.
        paused_s, slowed_s: seconds in which the process, or the step loop, stood still.
        busy_s: when a sequence was last seen unfinished.
    """

    def __init__(self, scenario: Scenario, clock: VirtualClock, wall: WallClock) -> None:
        self.scenario = scenario
        self.clock = clock
        self.wall = wall
        self.delays = Chance(scenario.seed, "delays")
        self.ends_orderly = Chance(scenario.seed, "end").flip(0.7)
        self.events: list[tuple[Any, ...]] = []
        self.violation: str | None = None
        self.is_over = False
        self.crash: BaseException | None = None
        self.loaded_s: float | None = None
        self.failed_s: float | None = None
        self.stopping_s: float | None = None
        self.paused_s = self.slowed_s = 0.0
        self.busy_s = -math.inf
        self.engine: Engine | None = None
        self.executor: SimulatedExecutor | None = None
        self.scheduler: Scheduler | None = None
        self.host: SimulatedHost | None = None
        self.server: SimulatedServer | None = None
        self.observer = Observer(self)
        self.num_served = 0
        self.program = ServerProcess(self) if scenario.standalone else EmbeddingProgram(self)
        self._ended = trio.Event()
        self._scope = trio.CancelScope()
        self._tasks: trio.Nursery | None = None

    # -- what parts tell

    def log(self, kind: str, *details: object) -> None:
        self.events.append((round(self.clock.now_s, 6), kind, *details))

    def expect(self, holds: bool, what: str) -> None:
        """Note a violation, the first one, and end the world, unless it holds."""
        if not holds and self.violation is None:
            self.violation = what
            self.log("violation", what)
            self._end()

    def spawn(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run something that lives as long as the world."""
        assert self._tasks is not None
        self._tasks.start_soon(task, *args)

    def inspect(self, *, moved: bool) -> None:
        """Look at everything. Called after every move of the step loop, and every delivery to the event loop."""
        if not self.is_over:
            self.observer.look(moved=moved)

    def note_engine(self, engine: Engine) -> None:
        self.engine = engine
        self.loaded_s = self.clock.now_s
        self.log("loaded")

    def note_plan(self, plan: StepPlan) -> None:
        self.log("plan", plan.step_id, len(plan.sequences), plan.num_tokens)
        self.observer.look_at_plan(plan)

    def step_fails(self, when: str, step_id: int) -> bool:
        faults = self.scenario.faults
        fails = step_id == (faults.fail_submit if when == "submit" else faults.fail_wait)
        if fails:
            self.failed_s = self.clock.now_s
            self.log("step fails", when, step_id)
        return fails

    def note_log(self, record: logging.LogRecord) -> None:
        """Whatever is logged as an error or a warning must be the consequence of a fault that was injected."""
        text = record.getMessage()
        if self.is_over:
            return
        self.log("log", record.levelname, text)
        faults = self.scenario.faults
        stood_still = self.hangs or bool(self.slowed_s or self.paused_s)
        reasons = {
            "the step loop failed": self.failed_s is not None,
            "the engine has failed": self.failed_s is not None,
            "the engine cannot be started": faults.load_fails,
            "no step has completed": stood_still,
            "steps complete again": stood_still,
            "requests that still run": self.stopping_s is not None,
            "the step thread did not end": stood_still,
        }
        known = [holds for beginning, holds in reasons.items() if text.startswith(beginning)]
        self.expect(any(known), f"logged for no reason: {record.levelname} {text} {record.exc_info or ''}")

    @property
    def was_stopped(self) -> bool:
        """Whether all timers ran out together: a program with an ordinary clock that stood still for long."""
        return not self.scenario.standalone and self.paused_s >= self.scenario.server.stall_timeout_s

    @property
    def hangs(self) -> bool:
        """Whether the device has stopped to answer."""
        return self.host is not None and self.host.is_hanging

    def is_busy(self, since_s: float) -> bool:
        """Whether some sequence was unfinished since then, or one is to come whose prompt is being made."""
        if self.busy_s >= since_s:
            return True
        engine = self.engine
        return engine is not None and engine._router.num_unfinished + engine._client._num_preparing > 0

    @property
    def most_sequences(self) -> int:
        """How many sequences one request may have at most."""
        return self.scenario.capacity.max_num_seqs + self.scenario.engine.scheduler.max_queue

    @property
    def drain_limit_s(self) -> float:
        """When admitted requests may be closed because the program ends; infinite as long as it does not."""
        if self.stopping_s is None:
            return math.inf
        if not self.scenario.standalone and not self.ends_orderly:
            return self.stopping_s
        return self.stopping_s + self.scenario.server.drain_timeout_s

    # -- its life

    async def run(self) -> None:
        try:
            await self._run()
        except* ProcessEnded as group:
            ended = group.exceptions[0]
            assert isinstance(ended, ProcessEnded)
            self._note_exit(ended.code)

    async def _run(self) -> None:
        with self._scope:
            async with trio.open_nursery() as self._tasks:
                self.spawn(self._run_program)
                self.spawn(self._watch_horizon)
                for cause in self._disturbances():
                    self.spawn(cause)
                async with trio.open_nursery() as clients:
                    for ask in self.scenario.asks:
                        clients.start_soon(run_client, self, ask)
                self.log("clients have ended")
                await self.observer.look_at_rest()
                self._stop()
                await self._ended.wait()
                self.observer.look_at_end()
                self._end()

    def _end(self) -> None:
        self.is_over = True
        self._scope.cancel()

    def _note_exit(self, code: int) -> None:
        """A second signal ends the process at once; nothing else may, unless the device hangs."""
        self.is_over = True
        self.log("exit", code)
        by_signal = self.scenario.faults.second_signal_s is not None and code == 128 + 15
        if self.violation is None and not (by_signal or self.hangs):
            self.violation = f"the process ended itself with code {code}"

    async def _run_program(self) -> None:
        await self.program.run()
        self.log("program ended")
        self._ended.set()

    async def _watch_horizon(self) -> None:
        await trio.sleep(HORIZON_S)
        self.expect(False, f"requests or the program hang: {self.observer.open_requests}")

    async def stop_later(self, seconds: float) -> None:
        """End the program, since nothing else will."""
        await trio.sleep(seconds)
        self._stop()

    def _stop(self) -> None:
        if self._ended.is_set():
            return
        if self.stopping_s is None:
            self.stopping_s = self.clock.now_s
            self.log("stop")
            self.program.stop()

    # -- what happens to it

    def _disturbances(self) -> list[Callable[[], Awaitable[None]]]:
        faults = self.scenario.faults
        causes: list[Callable[[], Awaitable[None]]] = []
        if faults.stop_s is not None:
            causes.append(self._stop_later)
        causes += [self._at(when, lambda by=by: self._set_wall(by)) for when, by in faults.wall_jumps]
        causes += [self._at(when, lambda by=by: self._pause(by)) for when, by in faults.pauses]
        causes += [self._at(when, self._reset_prefix_cache) for when in faults.resets]
        return causes

    def _at(self, when: float, act: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        async def wait() -> None:
            await trio.sleep_until(when)
            act()

        return wait

    async def _stop_later(self) -> None:
        faults = self.scenario.faults
        assert faults.stop_s is not None
        await trio.sleep(faults.stop_s)
        self._stop()
        if faults.second_signal_s is not None:
            await trio.sleep(faults.second_signal_s)
            if not self._ended.is_set():
                self.log("second signal")
                self.program.stop()

    def _set_wall(self, seconds: float) -> None:
        self.log("the time of day changes", seconds)
        self.wall.offset_s += seconds

    def _pause(self, seconds: float) -> None:
        self.log("pause", seconds)
        self.paused_s += seconds
        self.clock.jump(seconds)

    def _reset_prefix_cache(self) -> None:
        """As after a change of the model's weights: what nobody holds is not to be read any more."""
        scheduler, executor = self.scheduler, self.executor
        if scheduler is None or executor is None:
            return
        self.log("prefix cache reset")
        scheduler.reset_prefix_cache()
        pool = scheduler.kv.pool
        executor.scribble(block_id for block_id in range(pool.num_blocks) if pool.is_free(block_id))
