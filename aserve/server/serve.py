"""A whole server process: socket, engine, connections, signals, exit code.

Starts in the order bind, accept, load: the app answers 503 until the engine is there. Stops in the order admission,
running requests, engine and connections: the engine outlives every request that it admitted. Exit codes: 0 after
SIGTERM or SIGINT, 1 when the start failed or the stop hung (0 if that was while loading), 70 when the engine failed,
128 + n when a second signal n came. SIGHUP has the certificate read again; without TLS it ends the server.
Called by ``aserve.cli``.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from types import FrameType
from typing import TYPE_CHECKING

import trio

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig, ServerConfig
from aserve.core.errors import AserveError, ConfigError, EngineDrainingError
from aserve.planning.table import memory_table
from aserve.server.clock import RunningClock
from aserve.server.engine_slot import EngineSlot
from aserve.server.guard import GuardConfig, GuardedServer, root_cause
from aserve.server.listener import bind, url
from aserve.server.log import LogWriter, configure_logging, open_standard_files

if TYPE_CHECKING:
    from aserve.engine.engine import Engine

logger = logging.getLogger(__name__)

OpenEngine = Callable[[EngineConfig], "AbstractAsyncContextManager[Engine]"]

EXIT_START_FAILED = 1
EXIT_ENGINE_FAILED = 70  # EX_SOFTWARE
CLOSE_GRACE_S = 2.0  # for answers, or errors, that are on their way when the engine is gone
ERROR_GRACE_S = 1.0  # for the error answers of a failed or drained engine, before connections are closed
RETRY_AFTER_DRAIN_S = 10.0
STOP_LIMIT_S = 15.0  # beyond all other limits: then something hangs, and the process ends itself
_MAX_FILES = 65536
_OWN_FILES = 64  # what the process opens beside its connections
_LAST_LINES_S = 1.0
_TICK_S = 1.0


def run_server(
    engine_config: EngineConfig, server_config: ServerConfig, *, open_engine: OpenEngine | None = None
) -> int:
    """Serve until a signal, and return the process's exit code (see the module). Logs and reports on stderr.

    Args:
        open_engine: opens the engine as a scope; default ``aserve.assembly.open_engine``.
    """
    open_standard_files()
    log = LogWriter()
    configure_logging(log, server_config.log_level)
    try:
        return _run(engine_config, server_config, open_engine or _assembled(), log)
    finally:
        log.flush(_LAST_LINES_S)


def _run(engine_config: EngineConfig, server_config: ServerConfig, open_engine: OpenEngine, log: LogWriter) -> int:
    try:
        process = _Process(engine_config, server_config, open_engine, log)
    except AserveError as error:
        log.put(f"aserve: error: {error.message}")
        return EXIT_START_FAILED
    try:
        trio.run(process.run, clock=RunningClock())
    except KeyboardInterrupt:  # before or after the time in which signals are received
        return 128 + signal.SIGINT
    except Exception:
        logger.exception("the server failed")
        return EXIT_START_FAILED
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if process.failure is not None:
        logger.critical("the engine failed: %s", _describe(process.failure))
    return process.exit_code


class _Process:
    """What lives as long as the process; ``run`` is its task tree."""

    def __init__(
        self, engine_config: EngineConfig, server_config: ServerConfig, open_engine: OpenEngine, log: LogWriter
    ) -> None:
        from aserve.server.app import App

        self._log = log
        self._engine_config = engine_config
        self._config = server_config
        self._open_engine = open_engine
        self._slot = EngineSlot()
        tls = server_config.tls_certificate is not None
        http_config = GuardConfig.from_server(server_config)
        http_config.max_connections = _connections_that_fit(server_config.max_connections)
        app = App(self._slot, server_config, owns_listener=True)
        self._counts = app.counts
        sock = bind(server_config.host, server_config.port, user_timeout_s=server_config.stall_timeout_s)
        self._url = url(sock, tls=tls)
        try:
            self._server = GuardedServer(app, http_config, sock)
        except OSError as error:
            sock.close()
            pair = f"{server_config.tls_certificate} and {server_config.tls_key}"
            if server_config.tls_client_ca is not None:
                pair += f" with the client authorities {server_config.tls_client_ca}"
            raise ConfigError(f"cannot use the TLS certificate and key {pair}: {error}") from error
        self._engine_scope = trio.CancelScope()
        self._release_engine = trio.Event()
        self._stopping = False
        self.exit_code = 0
        self.failure: BaseException | None = None

    async def run(self) -> None:
        """Serve until stopped."""
        with trio.open_signal_receiver(*self._signals()) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_signals, signals)
                async with trio.open_nursery() as work:
                    work.start_soon(self._own_engine)
                    await work.start(self._server.run)
                    self._say(f"listening on {self._url}, loading the model")
                nursery.cancel_scope.cancel()

    # ---- the engine

    async def _own_engine(self) -> None:
        started = trio.current_time()
        try:
            with self._engine_scope:
                async with self._open_engine(self._engine_config) as engine:
                    self._slot.fill(engine)
                    names, seconds = ", ".join(engine.model_names), trio.current_time() - started
                    self._say(f"ready on {self._url} (model {names}) after {seconds:.1f} s")
                    self._print_memory(engine.capacity)
                    gc.freeze()  # the loaded modules stay: no collection has to walk them again
                    await self._accompany(engine)
        except* AserveError as group:
            self._start_failed()
            self._say(f"error: {_describe(group)}")
        except* Exception:
            self._start_failed()
            logger.exception("the engine could not be started" if self._slot.engine is None else "the engine failed")
        finally:
            self._server.stop(CLOSE_GRACE_S)

    def _start_failed(self) -> None:
        self.exit_code = self.exit_code or EXIT_START_FAILED

    async def _accompany(self, engine: Engine) -> None:
        """Keep the engine open until it is released, and act on what happens to it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_death, engine)
            nursery.start_soon(self._watch_progress, engine)
            await self._release_engine.wait()
            nursery.cancel_scope.cancel()

    async def _watch_death(self, engine: Engine) -> None:
        await engine.wait_dead()
        self.failure, self.exit_code = engine.failure, EXIT_ENGINE_FAILED
        logger.error("the engine has failed; its requests are answered with an error, then the server ends")
        self._end_after(STOP_LIMIT_S, EXIT_ENGINE_FAILED)
        await trio.sleep(ERROR_GRACE_S)
        self._server.stop(ERROR_GRACE_S)
        self._release_engine.set()

    async def _watch_progress(self, engine: Engine) -> None:
        stalled = False
        while True:
            await trio.sleep(min(1.0, self._config.watchdog_s))
            if engine.stalled(self._config.watchdog_s) != stalled:
                stalled = not stalled
                if stalled:
                    logger.error("no step has completed for %g s although work exists", self._config.watchdog_s)
                else:
                    logger.warning("steps complete again")

    # ---- the end

    def _signals(self) -> tuple[signal.Signals, ...]:
        if self._config.tls_certificate is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            return (signal.SIGINT, signal.SIGTERM)  # nohup: a closed terminal is to mean nothing
        return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    async def _watch_signals(self, signals: AsyncIterator[int]) -> None:
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if number == signal.SIGHUP and self._config.tls_certificate is not None:
                    self._server.reload_tls()
                elif not self._stopping:
                    self._stopping = True
                    for each in (signal.SIGINT, signal.SIGTERM):  # the second ends even a loop that is stuck
                        signal.signal(each, self._end_now)
                    nursery.start_soon(self._shut_down, signal.Signals(number).name)

    async def _shut_down(self, why: str) -> None:
        engine = self._slot.engine
        if engine is None:
            logger.info("%s while loading: ending", why)
            self._end_after(CLOSE_GRACE_S + 1.0, 0)
            self._engine_scope.cancel()
            return
        limit_s = self._config.drain_timeout_s
        logger.info("%s: no new requests are taken; running ones have %g s", why, limit_s)
        self._end_after(limit_s + ERROR_GRACE_S + CLOSE_GRACE_S + STOP_LIMIT_S, EXIT_START_FAILED)
        engine.start_draining(RETRY_AFTER_DRAIN_S)
        await self._server.wind_down()
        with trio.move_on_after(limit_s) as limit:
            await engine.wait_idle()
            await self._counts.wait_none_active()  # a client may still be reading what the engine is done with
        if limit.cancelled_caught:
            logger.warning("requests that still run after %g s are closed", limit_s)
            text = f"the server is shutting down, and this answer was not complete within {limit_s:g} s"
            engine.close_all(lambda: EngineDrainingError(text, retry_after_s=RETRY_AFTER_DRAIN_S))
            with trio.move_on_after(ERROR_GRACE_S):
                await self._counts.wait_none_active()
        self._release_engine.set()
        self._server.stop(CLOSE_GRACE_S)

    def _end_now(self, number: int, _: FrameType | None) -> None:
        self._say(f"{signal.Signals(number).name} again: ending at once")
        self._log.flush(_LAST_LINES_S)
        os._exit(128 + number)

    def _end_after(self, seconds: float, code: int) -> None:
        """Arm the last resort: a thread stuck in a driver, or a loop that is stuck, cannot be joined.

        Counts the ticks that arrive: of those that come while the process is stopped only one does, so that, as with
        ``RunningClock``, that time does not count. It cannot be asked: a stuck loop looks to it like a stopped process.
        """
        left = math.ceil(seconds / _TICK_S)

        def tick(_: int, __: FrameType | None) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                self._say("the server did not end in time: ending at once")
                self._log.flush(_LAST_LINES_S)
                os._exit(code)

        signal.signal(signal.SIGALRM, tick)
        signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)

    def _print_memory(self, capacity: Capacity) -> None:
        if capacity.memory is not None:
            for line in memory_table(capacity.memory, capacity).splitlines():
                self._log.put(line)

    def _say(self, text: str) -> None:
        self._log.put(f"aserve: {text}")


def _assembled() -> OpenEngine:
    from aserve.assembly import open_engine

    return open_engine


def _connections_that_fit(wanted: int) -> int:
    """Take the file descriptors that the system allows: each connection is one, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    fit = max(files - _OWN_FILES, 1)
    if fit < wanted:
        logger.warning("%d connections can be open, not %d: the system allows %d files", fit, wanted, files)
    return min(fit, wanted)


def _describe(error: BaseException) -> str:
    error = root_cause(error)
    return error.message if isinstance(error, AserveError) else f"{type(error).__name__}: {error}"
