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
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper

from aserve.server.guard.config import GuardConfig
from aserve.server.guard.connection import GuardedConnection
from aserve.server.guard.outbox import PlainStream, TlsStream

logger = logging.getLogger(__name__)

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ACCEPT_PAUSE_S = 0.1


class GuardedServer:
    """An ASGI app on a listening socket. ``run`` it in a nursery; ``stop`` makes ``run`` return.

    Args:
        app: The ASGI application; its lifespan is not run.
        config: Settings; a certificate in it turns TLS on, with HTTP/2 by ALPN.
        sock: Bound and listening; closed by ``run``.
    """

    def __init__(self, app: Any, config: GuardConfig, sock: socket.socket) -> None:
        self._app = ASGIWrapper(app)
        self._config = config
        self._socket = sock
        self._tls: ssl.SSLContext | None = config.create_ssl_context()
        self._live: set[GuardedConnection] = set()
        self._accepting = trio.CancelScope()
        self._connections = trio.CancelScope()

    @property
    def num_connections(self) -> int:
        """Connections that are open now."""
        return len(self._live)

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

    def stop(self, grace_s: float) -> None:
        """Accept no more; connections end with their running requests, and after ``grace_s`` seconds in any case."""
        self._connections.deadline = trio.current_time() + grace_s
        self._accepting.cancel()

    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        warned = False
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                if not warned:
                    logger.warning("no new connections for now: %s (%d are open)", error.strerror, len(self._live))
                warned = True
                await trio.sleep(_ACCEPT_PAUSE_S)
            else:
                warned = False
                nursery.start_soon(self._serve, stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        wrapped: PlainStream | TlsStream = stream
        if self._tls is not None:
            wrapped = trio.SSLStream(stream, self._tls, server_side=True, https_compatible=True)
        connection = GuardedConnection(self._app, self._config, wrapped)
        self._live.add(connection)
        try:
            await connection.run()
        finally:
            self._live.discard(connection)
            stream.socket.close()
