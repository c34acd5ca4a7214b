"""One connection: hypercorn's ``TCPServer`` in which no fault leaves, nothing waits for ever, and the end is the end.

Tasks: the reader (this one), the outbox's writer, a timer, the HTTP/2 sender, and one per app. Only the reader tells
the protocol that the connection is gone: hypercorn does it in the task of whichever app's write failed, and loses the
other apps' disconnects when that task is cancelled. Created by ``server``, once per accepted socket.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, cast

import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H2ProtocolAssumedError
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from aserve.server.guard.config import GuardConfig
from aserve.server.guard.ending import Ending
from aserve.server.guard.http1 import GuardedHTTP1
from aserve.server.guard.http2 import GuardedHTTP2
from aserve.server.guard.outbox import Outbox, PlainStream, TlsStream
from aserve.server.guard.timer import Timer
from aserve.server.guard.turns import Turns

logger = logging.getLogger(__name__)

_GONE = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
_LAST_WORD_S = 1.0
_READ_BYTES = 2**12  # what one peer has done for it before the others have their turn: a few ms at worst


class _Background:
    """What hypercorn's protocols know as their task group; apps are started by ``GuardedStream``."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        self._nursery.start_soon(task)


class _Protocol(ProtocolWrapper):
    """Hypercorn's switch between the two protocols, with the guarded ones in it."""

    protocol: GuardedHTTP1 | GuardedHTTP2  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, connection: GuardedConnection, apps: trio.Nursery, *args: Any) -> None:
        super().__init__(*args)
        self._connection = connection
        self._apps = apps
        self._args = (*args[:-2], args[-2])
        if args[-1] == "h2":
            self.protocol = self._http2()
        else:
            drain, ending = connection.outbox.drain, connection.ending
            self.protocol = GuardedHTTP1(*args[:-1], apps=apps, drain=drain, ending=ending)

    def _http2(self) -> GuardedHTTP2:
        connection = self._connection
        return GuardedHTTP2(
            *self._args,
            apps=self._apps,
            drain=connection.outbox.drain,
            call_at=connection.timer.call_at,
            ending=connection.ending,
        )

    async def handle(self, event: Event) -> None:
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as error:
            self.protocol = self._http2()  # pyright: ignore[reportIncompatibleVariableOverride]
            await self.protocol.initiate()
            await self.protocol.handle(RawData(data=error.data))


class GuardedConnection(TCPServer):
    """See the module."""

    config: GuardConfig
    protocol: _Protocol  # pyright: ignore[reportIncompatibleVariableOverride]
    stream: PlainStream | TlsStream  # type: ignore[assignment]

    def __init__(
        self, app: Any, config: GuardConfig, stream: PlainStream | TlsStream, *, turns: Turns, winding: bool = False
    ) -> None:
        # a context of its own, so that `terminated` means: this connection takes no more requests
        super().__init__(app, config, WorkerContext(None), ConnectionState({}), stream)  # type: ignore[arg-type]
        self.outbox = Outbox(stream, config.stall_timeout, self._gone)
        self.timer = Timer(self._on_timer)
        self.ending = Ending(winding)
        self._turns = turns
        self._reading = trio.CancelScope()
        self._handshaking = trio.CancelScope()
        self._lingering = trio.CancelScope()
        self._idle_since = trio.current_time()
        self._lost = False  # nothing can be written any more
        self._left = False  # the peer has sent its end of file
        self._lingers = False  # answered or refused, and the peer may be sending still
        self._idle = True
        self._in_headers = True
        self._close_at = inf

    async def run(self) -> None:
        """Serve the peer until either side leaves. Raises nothing but trio.Cancelled."""
        try:
            alpn = await self._handshake()
            if alpn is not None:
                await self._serve(alpn)
        except* _GONE as group:
            logger.debug("a connection was lost: %r", root_cause(group))
        except* Exception as group:  # a fault of ours or of hypercorn's, but of one connection only
            logger.warning("a connection was closed after an unexpected %r", root_cause(group))
            logger.debug("its traceback", exc_info=group)

    async def _handshake(self) -> str | None:
        if isinstance(self.stream, trio.SocketStream):
            return "http/1.1"
        self._handshaking.deadline = trio.current_time() + self.config.ssl_handshake_timeout
        with self._handshaking:
            await self.stream.do_handshake()
            return self.stream.selected_alpn_protocol() or "http/1.1"
        return None

    async def _serve(self, alpn: str) -> None:
        plain = isinstance(self.stream, trio.SocketStream)
        sock = (self.stream if isinstance(self.stream, trio.SocketStream) else self.stream.transport_stream).socket
        peer, own = sock.getpeername()[:2], sock.getsockname()[:2]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.outbox.run)
            nursery.start_soon(self.timer.run)
            async with trio.open_nursery() as apps:
                self.protocol = _Protocol(  # pyright: ignore[reportIncompatibleVariableOverride]
                    self,
                    apps,
                    self.app,
                    self.config,
                    self.context,
                    _Background(nursery),
                    self.state,
                    not plain,
                    peer,
                    own,
                    self.protocol_send,
                    alpn,
                )
                self._arm(self.config.header_timeout)
                await self.protocol.initiate()
                await self._read_data()
            await self._end(sock)
            nursery.cancel_scope.cancel()

    async def protocol_send(self, event: Event) -> None:
        """Take what the protocol says to the peer or about itself. Contains no checkpoint."""
        if isinstance(event, RawData):
            self.outbox.write(event.data)
        elif isinstance(event, Closed):
            self.close()
        elif isinstance(event, Updated):
            self._idle = event.idle
            if event.idle:
                self._idle_since = trio.current_time()
                self._in_headers = False
                self._arm(self.config.keep_alive_timeout)
            else:
                self._close_at = inf

    def close(self) -> None:
        """Stop reading; what was written still goes out."""
        self._handshaking.cancel()
        self._reading.cancel()

    def _gone(self) -> None:
        self._lost = True
        self.close()

    @property
    def idle_since(self) -> float:
        """Since when no request is here (trio's clock): for ever where it lingers, never where it is busy or ends."""
        if self._lingers:
            return inf if self._lingering.cancel_called else -inf
        return self._idle_since if self._idle and not self._reading.cancel_called else inf

    async def make_room(self) -> None:
        """End an idle connection, since a new one needs its place."""
        self._lingering.cancel()
        if hasattr(self, "protocol") and not self._lingers:
            await self.protocol.protocol.expire()
        self.close()

    async def wind_down(self) -> None:
        """Go on answering, but let the peer know that it should go elsewhere."""
        self.ending.winding = True
        if hasattr(self, "protocol"):
            await self.protocol.protocol.wind_down()

    async def begin_drain(self) -> None:
        """Take no further request; close when the running ones are answered."""
        await self.context.terminated.set()
        if hasattr(self, "protocol"):
            await self.protocol.protocol.begin_drain()
        else:  # still in the handshake
            self.close()

    async def _read_data(self) -> None:
        try:
            await self._read_until_the_end()
        finally:  # also when cancelled: an app that waits in a shield must learn that its connection is gone
            if self._lost:
                self.outbox.fail()
            with trio.move_on_after(_LAST_WORD_S, shield=True):
                if self._lost or not self._left:
                    await self.protocol.handle(Closed())

    async def _read_until_the_end(self) -> None:
        with self._reading:
            while not self._left:
                await self.protocol.protocol.ready_to_read()
                try:
                    data = await self.stream.receive_some(_READ_BYTES)
                except _GONE:
                    self._lost = True
                    break
                self._left = not data
                began = trio.current_time()
                await self.protocol.handle(RawData(data=bytes(data)))
                if self.protocol.protocol.is_noisy:
                    await self._turns.give_way(trio.current_time() - began)
                if self._idle and not self._in_headers and self.protocol.protocol.in_headers:
                    self._in_headers = True
                    self._arm(self.config.header_timeout)

    def _arm(self, seconds: float) -> None:
        self._close_at = trio.current_time() + seconds
        self.timer.call_at(self._close_at)

    async def _on_timer(self) -> None:
        now = trio.current_time()
        if self._close_at <= now:
            await self.protocol.protocol.expire()
            self.close()
        else:
            self.timer.call_at(self._close_at)
            await self.protocol.protocol.check(now, self.config.stall_timeout)

    async def _end(self, sock: trio.socket.SocketType) -> None:
        """Send what is left, say that it was all, and read on for a while where the peer may not have noticed."""
        await self.outbox.drain()
        if self._lost:
            return
        sock.shutdown(trio.socket.SHUT_WR)
        if self.protocol.protocol.linger and not self._left:
            self._lingers = True
            self._lingering.deadline = trio.current_time() + self.config.linger_timeout
            with self._lingering:
                while await sock.recv(_READ_BYTES):
                    pass


def root_cause(error: BaseException) -> BaseException:
    """The first error of a group of groups; ``error`` itself if it is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
