"""Accepts connections and gives each a ``GuardedConnection``; drains and stops them.

In place of ``hypercorn.trio.serve``: that one takes its connection class from a module's scope, ties the engine's life
to the lifespan protocol (where a failing task goes unnoticed), and logs a traceback per refused accept when file
descriptors run out. Called by ``aserve.server.serve``; knows ASGI, not aserve.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
from math import inf
from operator import itemgetter
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper

from aserve.server.guard.config import GuardConfig
from aserve.server.guard.connection import GuardedConnection
from aserve.server.guard.outbox import PlainStream, TlsStream
from aserve.server.guard.tls import tls_context
from aserve.server.guard.turns import Turns

logger = logging.getLogger(__name__)

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ACCEPT_PAUSE_S = 0.1
_COMPLAIN_EVERY_S = 60.0
_MAX_LEAVING = 64


class GuardedServer:
    """An ASGI app on a listening socket. ``run`` it in a nursery; ``stop`` makes ``run`` return.

    Args:
        app: The ASGI application; its lifespan is not run.
        config: Settings; a certificate in it turns TLS on, with HTTP/2 by ALPN.
        sock: Bound and listening; closed by ``run``.

    Raises:
        OSError: The certificate cannot be read or used.
    """

    def __init__(self, app: Any, config: GuardConfig, sock: socket.socket) -> None:
        self._app = ASGIWrapper(app)
        self._config = config
        self._socket = sock
        self._tls = self._read_tls()
        self._live: dict[GuardedConnection, None] = {}  # ordered by age
        self._leaving: set[GuardedConnection] = set()  # those of them that were closed for new ones
        self._longest_idle: list[tuple[float, GuardedConnection]] = []  # as it was some time ago, the longest last
        self._winding = False
        self._turns = Turns()
        self._room = trio.Event()
        self._quiet_until = -inf
        self._accepting = trio.CancelScope()
        self._connections = trio.CancelScope()

    @property
    def num_connections(self) -> int:
        """Connections that are open now, but for those that were told to leave since new ones needed their place."""
        return len(self._live) - len(self._leaving)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept and serve until ``stop``; cancelling ends everything at once."""
        with self._connections:
            async with trio.open_nursery() as nursery:
                task_status.started()
                with self._accepting:
                    async with trio.SocketListener(trio.socket.from_stdlib_socket(self._socket)) as listener:
                        await self._accept(listener, nursery)
                for connection in list(self._live):
                    await connection.begin_drain()

    def _read_tls(self) -> ssl.SSLContext | None:
        config = self._config
        if config.certfile is None or config.keyfile is None:
            return None
        return tls_context(config.certfile, config.keyfile, config.client_ca)

    def reload_tls(self) -> None:
        """Read certificate, key and authorities again, for new connections. What cannot be used changes nothing."""
        try:
            self._tls = self._read_tls()
        except OSError as error:
            logger.error("the TLS certificate or key cannot be used, the old ones stay: %s", error)
        else:
            logger.info("the TLS certificate was read again")

    async def wind_down(self) -> None:
        """Before ``stop``: answer what comes, but ask peers to close (``Connection: close``, GOAWAY when idle)."""
        self._winding = True
        for connection in list(self._live):
            await connection.wind_down()

    def stop(self, grace_s: float) -> None:
        """Accept no more; connections end with their running requests, and after ``grace_s`` seconds in any case."""
        self._connections.deadline = trio.current_time() + grace_s
        self._accepting.cancel()

    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        while True:
            if self._is_full():
                await trio.lowlevel.wait_readable(listener.socket)  # only a client that waits is worth a place
                await self._make_room()
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                self._complain(f"no new connections for now: {error.strerror} ({len(self._live)} are open)")
                await trio.sleep(_ACCEPT_PAUSE_S)
            else:
                wrapped: PlainStream | TlsStream = stream
                if self._tls is not None:
                    wrapped = trio.SSLStream(stream, self._tls, server_side=True, https_compatible=True)
                connection = GuardedConnection(
                    self._app, self._config, wrapped, turns=self._turns, winding=self._winding
                )
                self._live[connection] = None
                nursery.start_soon(self._serve, connection, stream)

    def _is_full(self) -> bool:
        """Those that were told to leave need no place of their own, up to a number, since they may take a while."""
        num_leaving = min(len(self._leaving), _MAX_LEAVING)
        return len(self._live) - num_leaving >= self._config.max_connections

    async def _make_room(self) -> None:
        """Wait until one more connection may be open. The one that has been idle for longest is closed for it."""
        while self._is_full():
            if len(self._leaving) < _MAX_LEAVING and (longest := self._pop_longest_idle()) is not None:
                self._leaving.add(longest)
                await longest.make_room()
                continue
            if not self._leaving:
                self._complain(f"all of the {len(self._live)} connections that may be open are busy: new ones wait")
            self._room = trio.Event()
            with trio.move_on_after(_ACCEPT_PAUSE_S):  # or until one becomes idle
                await self._room.wait()

    def _pop_longest_idle(self) -> GuardedConnection | None:
        """The next to be closed for a new one. They are looked through once for many that come at once."""
        for _ in range(2):
            while self._longest_idle:
                since, connection = self._longest_idle.pop()
                if connection in self._live and connection not in self._leaving and connection.idle_since == since:
                    return connection
            idle = [(since, c) for c in self._live if c not in self._leaving and (since := c.idle_since) < inf]
            self._longest_idle = sorted(idle, key=itemgetter(0), reverse=True)
        return None

    def _complain(self, text: str) -> None:
        now = trio.current_time()
        if now >= self._quiet_until:
            logger.warning(text)
            self._quiet_until = now + _COMPLAIN_EVERY_S

    async def _serve(self, connection: GuardedConnection, stream: trio.SocketStream) -> None:
        try:
            await connection.run()
        finally:
            del self._live[connection]
            self._leaving.discard(connection)
            self._room.set()
            stream.socket.close()
