"""One answer on its way out: every ``send`` of a request passes here, one at a time.

Keeps what the request's timers need (whether a send is in progress, and how many have ended) and lets one of them
write keep-alive comments between the sender's chunks. No clock is read here: that would cost more than the rest of a
chunk. Knows no cancellation: the request scope shields the callers.
"""

from __future__ import annotations

import anyio

from aserve.core.errors import GenerationClosedError
from aserve.server.asgi import RawHeaders, RequestHead, Send
from aserve.server.reply import Reply
from aserve.server.sse import KEEP_ALIVE

PIECE_BYTES = 64 * 1024

_STREAM_HEADERS: RawHeaders = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Outgoing:
    """The sending side of one request.

    Attributes:
        started: whether status and headers are out, so that an error can no longer be a status.
        finished: whether the last part has been handed over.
        stream: whether events are being streamed.
        sending: whether a send is in progress.
        num_sent: sends that have ended.
    """

    def __init__(self, head: RequestHead, send: Send) -> None:
        self._head = head
        self._send = send
        self._pinged: anyio.Event | None = None
        self.started = False
        self.finished = False
        self.stream = False
        self.sending = False
        self.num_sent = 0

    async def reply(self, reply: Reply) -> None:
        """Send a whole answer."""
        self.started = True
        await self._one(reply.start(self._head))
        await self.write(reply.body, last=True)

    async def start_stream(self) -> None:
        """Send status and headers of an event stream at once; the empty part makes servers flush them."""
        self.started = self.stream = True
        headers = [*_STREAM_HEADERS, *self._head.reply_headers]
        await self._one({"type": "http.response.start", "status": 200, "headers": headers})
        await self.write(b"")

    async def write(self, body: bytes, *, last: bool = False) -> None:
        """Send a part of the body. Raises GenerationClosedError if the server says that the client is gone.

        A large one goes out in pieces: a send that makes progress must not look stuck.
        """
        if self._pinged is not None:
            await self._pinged.wait()
        self.finished = last  # no comment may follow the last piece
        start = 0
        while len(body) - start > PIECE_BYTES:
            piece = body[start : start + PIECE_BYTES]
            await self._one({"type": "http.response.body", "body": piece, "more_body": True})
            start += PIECE_BYTES
        await self._one({"type": "http.response.body", "body": body[start:], "more_body": not last})

    async def ping_done(self) -> None:
        """Wait for a comment that is being sent: it must not be cut off either."""
        if self._pinged is not None:
            await self._pinged.wait()

    async def ping(self) -> None:
        """Send a comment, unless a send is in progress. Called by the timer's task."""
        if self.sending or self.finished:
            return
        self._pinged = anyio.Event()
        try:
            await self._one({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        finally:
            self._pinged.set()
            self._pinged = None

    async def _one(self, message: dict[str, object]) -> None:
        self.sending = True
        try:
            await self._send(message)
        except OSError:
            raise GenerationClosedError("the client left") from None
        self.sending = False
        self.num_sent += 1
