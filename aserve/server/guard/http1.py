"""HTTP/1.1 on one connection: hypercorn's ``H11Protocol`` that never stops reading and never switches to WebSocket.

Patches: bytes pipelined behind a running request are kept (up to a limit) instead of stopping the reader, so that a
disconnect is seen during prefill; WebSocket and h2c upgrades are ignored as RFC 9110 7.8 allows (a WebSocket upgrade
with one trailing byte ends stock hypercorn); a broken request body ends its app before the 400 goes out; a client
that expects ``100 Continue`` gets it when its app wants the body, so that a refusal can come first (RFC 9110, 10.1.1).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import trio
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Event, Request, Response
from hypercorn.protocol.h11 import STREAM_ID, H2ProtocolAssumedError, H11Protocol

from aserve.server.guard.config import GuardConfig
from aserve.server.guard.ending import Ending
from aserve.server.guard.stream import GuardedStream, LastWords, PeerLeft, StreamAborted, error_body

logger = logging.getLogger(__name__)

_READ_AHEAD_BYTES = 2**16
_SMALL_CHUNK_BYTES = 64
_MANY_SMALL_CHUNKS = 256


class GuardedHTTP1(H11Protocol):
    """See the module.

    Args:
        args: As hypercorn's ``H11Protocol``.
        apps: Where apps run.
        drain: Waits until the peer has taken what was written.
        ending: Whether the server is winding down.
    """

    config: GuardConfig
    stream: GuardedStream | None  # pyright: ignore[reportIncompatibleVariableOverride]
    connection: h11.Connection  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, *args: Any, apps: trio.Nursery, drain: Callable[..., Awaitable[None]], ending: Ending) -> None:
        super().__init__(*args)
        self._apps = apps
        self._drain = drain
        self._ending = ending
        self.linger = False  # the peer may be sending still when the connection is closed
        self._ahead = 0  # bytes read behind the running request
        self._room = trio.Event()
        self._num_small_chunks = 0  # of this request's body

    @property
    def is_noisy(self) -> bool:
        """Whether the body comes in so many pieces that it is mostly their framing that is worked on."""
        return self._num_small_chunks > _MANY_SMALL_CHUNKS

    async def ready_to_read(self) -> None:
        """Wait while the app, or the requests before this one, have to catch up."""
        while self._ahead > _READ_AHEAD_BYTES or (self.stream and self.stream.inbox.size > _READ_AHEAD_BYTES):
            self._room = trio.Event()
            await self._room.wait()

    def _on_read(self, _: int) -> None:
        self._room.set()

    async def handle(self, event: Any) -> None:
        """Feed what was read; ``RawData(b"")`` is the peer's end of file, ``Closed`` the end of the connection."""
        if not isinstance(event, RawData):
            await super().handle(event)
        elif event.data:
            if self.connection.their_state in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL):  # pyright: ignore[reportPrivateImportUsage]
                self._ahead += len(event.data)
            data = event.data
            if self.connection.their_state is h11.IDLE and not self.connection.trailing_data[0]:
                data = data.lstrip(b"\r\n")  # empty lines before a request are to be ignored (RFC 9112, 2.2)
            if data:
                self.connection.receive_data(data)
                await self._handle_events()
        elif self.stream is not None:
            await self.stream.handle(PeerLeft(stream_id=STREAM_ID))

    async def begin_drain(self) -> None:
        """No further request is taken; the running one finishes."""
        if self.stream is None:
            await self.send(Closed())

    async def wind_down(self) -> None:
        """Answers say from now on that they are the last ones of the connection."""

    async def check(self, now: float, stall_timeout: float) -> None:
        """Nothing to watch: on HTTP/1.1 a stalled peer is a stalled connection, which the outbox sees."""

    @property
    def in_headers(self) -> bool:
        """Whether part of a request's headers has arrived."""
        return self.stream is None and bool(self.connection.trailing_data[0])

    async def expire(self) -> None:
        """The time for the headers, or for the next request, is over."""
        if self.in_headers:
            await self._refuse(408, "request_timeout", "The request's headers took too long to arrive.")

    async def _refuse(self, status: int, code: str, message: str) -> None:
        self.linger = True
        headers, body = error_body(status, code, message)
        headers += [(b"connection", b"close"), *self.config.response_headers("h11")]
        try:
            data = self.connection.send(h11.Response(status_code=status, headers=headers)) or b""
            data += self.connection.send(h11.Data(data=body)) or b""
            data += self.connection.send(h11.EndOfMessage()) or b""
        except h11.LocalProtocolError:  # the answer to this request has already begun
            return
        await self.send(RawData(data=data))

    async def _handle_events(self) -> None:
        body = bytearray()  # the chunks of one read go to the app in one piece
        while True:
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                await self._close_stream()  # its body is broken: from here on the app's words are ignored
                if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
                    code = "headers_too_large" if error.error_status_hint == 431 else "malformed_request"
                    await self._refuse(error.error_status_hint, code, f"This is not valid HTTP/1.1: {error}.")
                await self.send(Closed())
                return
            if isinstance(event, h11.Request):
                if not await self._speaks_http1(event):
                    return
                if await self._refuses(event):
                    await self.send(Closed())
                    return
                await self.send(Updated(idle=False))
                await self._create_stream(event)
            elif isinstance(event, h11.Data) and self.stream is not None:
                self._num_small_chunks += len(event.data) < _SMALL_CHUNK_BYTES
                body += event.data
            else:
                if body and self.stream is not None:
                    await self.stream.handle(Body(stream_id=STREAM_ID, data=bytes(body)))
                    body.clear()
                if not isinstance(event, h11.EndOfMessage) or self.stream is None:
                    return  # needs data, or is paused behind the running request
                await self.stream.handle(EndBody(stream_id=STREAM_ID))

    async def _refuses(self, event: h11.Request) -> bool:
        if excess := self._excess(event):
            await self._refuse(431, "headers_too_large", excess)
        elif {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
            # h11 lets chunks win; a proxy before us may not, and what it takes for a body would be a request here
            message = "A request has a Content-Length or a Transfer-Encoding, not both (RFC 9112, 6.1)."
            await self._refuse(400, "malformed_request", message)
        else:
            return False
        return True

    def _excess(self, event: h11.Request) -> str | None:
        """What is too much about the headers; h11 looks only while they are incomplete."""
        most, most_bytes = self.config.max_headers, self.config.h11_max_incomplete_size
        if len(event.headers) > most:
            return f"The request has more than {most} headers."
        if len(event.target) + sum(len(name) + len(value) for name, value in event.headers) > most_bytes:
            return f"The request's headers are larger than {most_bytes} bytes."
        return None

    async def _speaks_http1(self, event: h11.Request) -> bool:
        """Raises H2ProtocolAssumedError for the preface of HTTP/2, which can only begin a connection."""
        if (event.method, event.target, event.http_version) != (b"PRI", b"*", b"2.0"):
            if event.http_version.startswith(b"1."):
                return True
            await self._refuse(505, "http_version_not_supported", "This is HTTP/1.1, or HTTP/2 by its preface.")
            await self.send(Closed())
            return False
        if self.keep_alive_requests == 0:
            raise H2ProtocolAssumedError(b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0])
        await self._refuse(400, "malformed_request", "HTTP/2 can only begin a connection, not follow a request on it.")
        await self.send(Closed())
        return False

    async def _create_stream(self, request: h11.Request) -> None:
        stream = GuardedStream(self, STREAM_ID, apps=self._apps, on_read=self._on_read, on_wait=self._ask_for_the_body)
        self.stream = stream  # pyright: ignore[reportIncompatibleVariableOverride]
        await stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=_origin_form(request.target),
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def _ask_for_the_body(self) -> None:
        if self.connection.they_are_waiting_for_100_continue:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    async def stream_send(self, event: Event) -> None:
        """What the request's stream wants to say. Waits for the peer only after a part of the body."""
        if isinstance(event, StreamAborted):
            await self._close_stream()
            await self.send(Closed())
            return
        if isinstance(event, Response) and (self._ending.winding or self.context.terminated.is_set()):
            event.headers.append((b"connection", b"close"))
        await super().stream_send(event)
        if isinstance(event, Body) and not isinstance(event, LastWords):
            await self._drain()

    async def _maybe_recycle(self) -> None:
        self.linger = self.connection.their_state is h11.SEND_BODY
        await super()._maybe_recycle()
        self._ahead = self._num_small_chunks = 0
        self._room.set()
        if self.connection.their_state is h11.IDLE and self.connection.trailing_data[0]:
            await self._take_pipelined()

    async def _take_pipelined(self) -> None:
        """Go on with what was read behind the request that has just been answered.

        This runs in the last ``send`` of that request's app, which has no part in what goes wrong here.
        """
        try:
            await self._handle_events()
        except Exception as error:  # a fault of ours or of hypercorn's, but of one connection only
            logger.warning("a connection was closed after an unexpected %r", error)
            logger.debug("its traceback", exc_info=error)
            await self.send(Closed())


def _origin_form(target: bytes) -> bytes:
    """The path and query of a target that is a whole URL, as proxies send it (RFC 9112, 3.2.2)."""
    if not target.lower().startswith((b"http://", b"https://")):
        return target
    return b"/" + target.split(b"//", 1)[1].partition(b"/")[2]
