"""One request: hypercorn's ``HTTPStream`` with a lossless inbox and a definite end.

An app that fails or returns before its answer is complete must be seen to fail by the client: a 500 when nothing was
sent yet, otherwise ``StreamAborted``, which HTTP/1.1 turns into a closed connection and HTTP/2 into RST_STREAM (stock
hypercorn leaves an HTTP/2 client waiting for ever). Created by the protocols; knows no wire format.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import trio
from hypercorn.protocol.events import Body, EndBody, Event, Response, StreamClosed
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.typing import TaskGroup

from aserve.server.guard.config import GuardConfig
from aserve.server.guard.inbox import Inbox

logger = logging.getLogger(__name__)

_LAST_WORD_S = 1.0


@dataclass(frozen=True)
class StreamAborted(Event):
    """The app ended without completing the answer that it began."""


@dataclass(frozen=True)
class PeerLeft(Event):
    """The peer sends no more, but may still be reading: the app is told, the answer stays open."""


@dataclass(frozen=True)
class LastWords(Body):
    """A part of an answer that is sent for an app that has ended: nobody waits until the peer has taken it."""


def error_body(status: int, code: str, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body, in OpenAI's error shape, for what never reaches the app."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))], body


class GuardedStream(HTTPStream):
    """See the module. ``request_ended`` says whether the whole request has arrived.

    ``on_read`` and ``on_wait`` are the inbox's. ``on_app`` is called with 1 when the app is started and with -1 when
    it has ended.
    """

    closed: bool
    state: ASGIHTTPState

    def __init__(
        self,
        protocol: Any,
        stream_id: int,
        *,
        apps: trio.Nursery,
        on_read: Callable[[int], None],
        on_wait: Callable[[], Awaitable[None]],
        on_app: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(
            protocol.app,
            protocol.config,
            protocol.context,
            cast(TaskGroup, self),
            protocol.ssl,
            protocol.client,
            protocol.server,
            protocol.stream_send,
            stream_id,
        )
        self.inbox = Inbox(on_read, on_wait)
        self.request_ended = False
        self._apps = apps
        self._on_app = on_app

    async def spawn_app(
        self, app: Any, config: GuardConfig, scope: Any, send: Callable[[Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        """Start the app in its connection's nursery (hypercorn calls this on its task group)."""
        scope["extensions"] = {}  # hypercorn's trailers, push and early hints are not part of the guard
        if self._on_app is not None:
            self._on_app(1)
        self._apps.start_soon(self._run_app, app, scope, send, name=f"{scope['method']} {scope['path']}")
        return self.inbox.put

    async def _run_app(self, app: Any, scope: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        try:
            await app(scope, self.inbox.receive, send, trio.to_thread.run_sync, trio.from_thread.run)
        except* Exception as group:
            logger.error("the application failed in %s %s", scope["method"], scope["path"], exc_info=group)
        finally:
            with trio.move_on_after(_LAST_WORD_S, shield=True):  # changes state before it waits, if it does
                await self.app_send(None)
            if self._on_app is not None:
                self._on_app(-1)

    async def handle(self, event: Event) -> None:
        """Pass on what the peer did. Contains no checkpoint."""
        if isinstance(event, PeerLeft):
            self.inbox.disconnect()
            return
        if isinstance(event, EndBody):
            self.request_ended = True
        await super().handle(event)

    async def app_send(self, message: Any) -> None:
        """The ASGI send callable; ``None`` says that the app has returned."""
        if message is None:
            if not self.closed and self.state in (ASGIHTTPState.RESPONSE, ASGIHTTPState.TRAILERS):
                self.state = ASGIHTTPState.CLOSED
                await self.send(StreamAborted(stream_id=self.stream_id))
                return
        elif self.closed or self.state is ASGIHTTPState.CLOSED:
            await trio.lowlevel.checkpoint()  # nobody reads this any more
            return
        await super().app_send(message)

    async def _send_closed(self) -> None:
        self.state = ASGIHTTPState.CLOSED  # before anything that can be cancelled: the answer is complete
        await self.send(EndBody(stream_id=self.stream_id))
        await self.send(StreamClosed(stream_id=self.stream_id))

    async def _send_error_response(self, status_code: int) -> None:
        self.state = ASGIHTTPState.CLOSED
        headers, body = error_body(status_code, "internal_error", "The server failed to answer this request.")
        await self.send(Response(stream_id=self.stream_id, headers=headers, status_code=status_code))
        if self.scope["method"] != "HEAD":
            await self.send(LastWords(stream_id=self.stream_id, data=body))
        await self.send(EndBody(stream_id=self.stream_id))
