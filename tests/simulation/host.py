"""The step loop's real code on the event loop's own thread, one move after the other in virtual time.

Stands for ``ThreadHost``. What a move may block on becomes time that passes while the event loop runs; what the step
loop says reaches the event loop a little later. After every move the world looks at everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import trio

from aserve.engine.bridge import CommandQueue
from aserve.engine.messages import Command, Submit
from aserve.engine.step_loop import Pause

if TYPE_CHECKING:
    from tests.simulation.world import World


class ObservedCommands(CommandQueue):
    """The real queue, and a list of what is in it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.untaken: list[Command] = []
        self.arrived = trio.Event()

    def put(self, command: Command) -> None:
        super().put(command)
        if isinstance(command, Submit):
            self._world.busy_s = trio.current_time()
        self.untaken.append(command)
        self.arrived.set()

    def take(self, *, block: bool) -> list[Command]:
        self.untaken.clear()
        return super().take(block=block)


class SimulatedHost:
    """Implements ``StepHost``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.commands: ObservedCommands = ObservedCommands(world)
        self._callbacks: list[Callable[[], object]] = []
        self._called = trio.Event()
        self._ended = False
        self._num_moves = 0
        self.is_hanging = False

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self._callbacks.append(callback)
        self._called.set()

    def clock(self) -> float:
        return trio.current_time()

    def start(self, moves: Iterator[object]) -> None:
        self._world.spawn(self._deliver)
        self._world.spawn(self._run, moves)

    def join(self, timeout_s: float) -> bool:
        del timeout_s
        return self._ended

    async def _run(self, moves: Iterator[object]) -> None:
        for pause in moves:
            self._num_moves += 1
            self._world.inspect(moved=True)
            await self._let_pass(pause)
        self._ended = True
        self._world.log("step loop ended")

    async def _let_pass(self, pause: object) -> None:
        faults, delays = self._world.scenario.faults, self._world.delays
        if pause is Pause.LOADING:
            await trio.sleep(faults.load_s)
        elif pause is Pause.COMMANDS:
            while not self.commands.untaken:
                self.commands.arrived = trio.Event()
                await self.commands.arrived.wait()
        elif pause is Pause.TURN:
            if delays.flip(0.5):
                await trio.lowlevel.checkpoint()
        elif faults.hang_at_move is not None and self._num_moves > faults.hang_at_move:
            self._world.log("the device hangs")
            self.is_hanging = True
            self._world.spawn(self._world.stop_later, 40.0)
            await trio.sleep_forever()
        elif faults.slow_share and delays.flip(faults.slow_share):
            self._world.slowed_s += faults.slow_s
            await trio.sleep(faults.slow_s)
        else:
            await trio.sleep(faults.step_s)

    async def _deliver(self) -> None:
        """Carry calls to the event loop, as its own wake-up would, now or a little later."""
        delays = self._world.delays
        while True:
            if not self._callbacks:
                self._called = trio.Event()
                await self._called.wait()
            if delays.flip(0.15):
                await trio.sleep(delays.choice((0.0, 0.002, 3 * self._world.scenario.faults.step_s)))
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()
            self._world.inspect(moved=False)
