"""Whole (not streamed) answers and the OpenAI error shape.

``answer`` sends one from outside a request scope. It is for answers given before the body was read, too: the client
may still be sending, and a connection closed under it would lose the answer, so what it sends is drained for a while.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import anyio
import orjson

from aserve.core.errors import AserveError, AuthenticationError, DeadlineExceededError, RequestTimeoutError
from aserve.server.asgi import RawHeaders, Receive, RequestHead, Send

logger = logging.getLogger(__name__)

DRAIN_BYTES = 32 * 2**20
DRAIN_S = 5.0
SEND_S = 30.0


@dataclass(frozen=True, slots=True)
class Reply:
    """Status, body and headers of one answer; ``content-length`` and the request id are added when it is sent."""

    status: int
    body: bytes
    headers: RawHeaders = field(default_factory=list[tuple[bytes, bytes]])

    def start(self, head: RequestHead, *, close: bool = False) -> dict[str, object]:
        """The ASGI message that begins this answer. ``close`` announces the end of an HTTP/1.1 connection."""
        headers = [*self.headers, *head.reply_headers]
        if self.status != 204:
            headers.append((b"content-length", str(len(self.body)).encode()))
        if close and head.is_http1:
            headers.append((b"connection", b"close"))
        return {"type": "http.response.start", "status": self.status, "headers": headers}


def json_reply(status: int, value: object, headers: RawHeaders | None = None) -> Reply:
    return Reply(status, orjson.dumps(value), [(b"content-type", b"application/json"), *(headers or [])])


def error_object(error: AserveError) -> dict[str, dict[str, str | None]]:
    """The error as OpenAI clients expect it."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_reply(error: AserveError) -> Reply:
    headers: RawHeaders = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    if isinstance(error, AuthenticationError):
        headers.append((b"www-authenticate", b"Bearer"))
    return json_reply(error.status, error_object(error), headers)


def internal_error() -> AserveError:
    """What a client is told of a fault in the server itself; the log has the rest."""
    return AserveError("the server failed to handle this request")


async def answer(
    head: RequestHead,
    reply: Reply,
    receive: Receive,
    send: Send,
    *,
    body_complete: bool = True,
    drain_s: float = DRAIN_S,
) -> None:
    """Send a whole answer. Cancellation from outside is not thrown into ``send``.

    With ``body_complete`` false the answer is sent at once, the rest of the request's body is read and dropped until
    it ends or ``DRAIN_BYTES`` or ``drain_s`` are reached, and only then is the answer finished. A client that waits
    for ``100 Continue`` sends no body once it has this answer, so there nothing is waited for (RFC 9110, 10.1.1).
    """
    body = b"" if head.method == "HEAD" else reply.body
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + SEND_S):
        await send(reply.start(head, close=not body_complete))
        if not body_complete and (head.header(b"expect") or b"").lower() != b"100-continue":
            await send({"type": "http.response.body", "body": body, "more_body": True})
            body = b""
            await _drain(receive, drain_s)
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def _drain(receive: Receive, seconds: float) -> None:
    seen = 0
    with anyio.move_on_after(seconds):
        while seen <= DRAIN_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return
            seen += len(message.get("body", b""))


def drain_time(error: AserveError) -> float:
    """A client that was too slow to send its body gets no more time for it."""
    return 0.0 if isinstance(error, RequestTimeoutError | DeadlineExceededError) else DRAIN_S
