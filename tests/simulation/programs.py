"""The two kinds of program that run an engine: the server process, and a program that embeds engine and application.

The server process is the real one (``aserve.server.serve``) but for its socket, its connections and the operating
system, which are replaced here. Used by the world.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import trio

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig
from aserve.core.errors import EngineDrainingError, ModelLoadError
from aserve.core.step import StepExecutor, StepResult, TokenEvent
from aserve.engine import new_scheduler
from aserve.engine.engine import Engine, run_engine
from aserve.scheduler import Scheduler
from aserve.server import serve
from aserve.server.app import create_app
from tests.simulation.asks import MODEL
from tests.simulation.connection import SimulatedServer
from tests.simulation.determinism import replace
from tests.simulation.host import SimulatedHost
from tests.simulation.model import ByteTokenizer, SimulatedExecutor

if TYPE_CHECKING:
    from tests.simulation.world import World


class ProcessEnded(Exception):
    """The process has called ``os._exit``."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@asynccontextmanager
async def open_engine(world: World, config: EngineConfig) -> AsyncGenerator[Engine]:
    """The world's engine: the real one over the simulated host and executor."""
    scenario = world.scenario

    def make_executor() -> StepExecutor:
        if scenario.faults.load_fails:
            raise ModelLoadError("injected: the checkpoint is damaged")
        world.executor = SimulatedExecutor(scenario.capacity, on_submit=world.note_plan, fails=world.step_fails)
        return world.executor

    def make_host() -> SimulatedHost:
        world.host = SimulatedHost(world)
        return world.host

    tokenizer: Any = ByteTokenizer()
    async with run_engine(
        executor_factory=make_executor, tokenizer=tokenizer, config=config, model_names=(MODEL,), make_host=make_host
    ) as engine:
        world.note_engine(engine)
        yield engine


@contextmanager
def remember_scheduler(world: World) -> Generator[None]:
    """Show the engine's scheduler, and all events that it makes, to the world."""

    def make(capacity: Capacity, **options: Any) -> Scheduler:
        scheduler = world.scheduler = Scheduler(capacity, **options)
        commit = scheduler.commit

        def observed(result: StepResult) -> tuple[TokenEvent, ...]:
            events = commit(result)
            world.observer.note_events(events)
            return events

        scheduler.commit = observed  # type: ignore[method-assign]
        return scheduler

    with replace({(new_scheduler, "Scheduler"): make}):
        yield


class ServerProcess:
    """``aserve serve``. ``stop`` is a signal to it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._send, self._receive = trio.open_memory_channel[int](10)
        self._handlers: dict[int, Callable[[int, Any], object]] = {}
        self._alarm_s: float | None = None
        self._interval_s = 0.0
        self._process: Any = None

    @property
    def counts(self) -> Any:
        return self._process._counts

    @contextmanager
    def replaced(self) -> Generator[None]:
        """The process's surroundings: socket, connections, signals, exit."""
        world = self._world

        def make_server(app: Any, *_: object) -> SimulatedServer:
            world.server = SimulatedServer(app, world)
            return world.server

        def exit_process(code: int) -> None:
            world.is_over = True
            raise ProcessEnded(code)

        surroundings: dict[tuple[Any, str], Any] = {
            (serve, "bind"): lambda *_, **__: SimpleNamespace(close=lambda: None),
            (serve, "url"): lambda *_, **__: "http://simulated",
            (serve, "GuardedServer"): make_server,
            (serve, "_connections_that_fit"): lambda wanted: wanted,
            (serve.gc, "freeze"): lambda: None,
            (signal, "signal"): self._handlers.__setitem__,
            (signal, "setitimer"): self._set_alarm,
            (os, "_exit"): exit_process,
            (trio, "open_signal_receiver"): self._receiver,
        }
        with replace(surroundings):
            yield

    async def run(self) -> None:
        world = self._world
        scenario = world.scenario
        log: Any = SimpleNamespace(put=lambda text: world.log("says", text), flush=lambda _: None)
        self._process = serve._Process(scenario.engine, scenario.server, lambda config: open_engine(world, config), log)
        await self._process.run()
        self._alarm_s = None
        faults = scenario.faults
        wanted = {0}
        if faults.load_fails:
            wanted = {1} if world.stopping_s is None else {0, 1}
        elif world.failed_s is not None:
            wanted = {70} if world.stopping_s is None else {0, 70}
        world.expect(self._process.exit_code in wanted, f"exit code {self._process.exit_code}, expected {wanted}")

    def stop(self) -> None:
        number = int(signal.SIGTERM)
        if number in self._handlers:
            self._handlers[number](number, None)
        else:
            self._send.send_nowait(number)

    @contextmanager
    def _receiver(self, *_: int) -> Generator[Any]:
        yield self._receive

    def _set_alarm(self, _: int, seconds: float, interval_s: float = 0.0) -> None:
        if self._alarm_s is None:
            self._world.spawn(self._watch_alarm)
        self._alarm_s, self._interval_s = self._world.clock.machine_s + seconds, interval_s

    async def _watch_alarm(self) -> None:
        """The system's timer, which goes on while the process is stopped; of the ticks that are missed one comes."""
        clock = self._world.clock
        while True:
            while self._alarm_s is None or clock.machine_s < self._alarm_s:
                await trio.sleep(1.0 if self._alarm_s is None else max(self._alarm_s - clock.machine_s, 1e-6))
            self._handlers[int(signal.SIGALRM)](int(signal.SIGALRM), None)
            self._alarm_s = clock.machine_s + self._interval_s if self._interval_s else None


class EmbeddingProgram:
    """A program with an engine and an application of its own, which it ends in an orderly way or at once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stopping = trio.Event()
        self._app: Any = None

    @property
    def counts(self) -> Any:
        return self._app.counts

    @contextmanager
    def replaced(self) -> Generator[None]:
        yield

    async def run(self) -> None:
        world = self._world
        scenario = world.scenario
        async with trio.open_nursery() as nursery:
            try:
                async with open_engine(world, scenario.engine) as engine:
                    self._app = create_app(engine=engine, server=scenario.server)
                    world.server = SimulatedServer(self._app, world)
                    await nursery.start(world.server.run)
                    await self._stopping.wait()
                    if world.ends_orderly:
                        await self._drain(engine)
            except ModelLoadError:
                world.expect(scenario.faults.load_fails, "loading failed")
                return
            world.server.stop(2.0)

    def stop(self) -> None:
        self._stopping.set()

    async def _drain(self, engine: Engine) -> None:
        engine.start_draining()
        with trio.move_on_after(self._world.scenario.server.drain_timeout_s):
            await engine.wait_idle()
            await self.counts.wait_none_active()
        engine.close_all(lambda: EngineDrainingError("the program ends"))
        with trio.move_on_after(1.0):
            await self.counts.wait_none_active()
