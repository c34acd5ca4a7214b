"""Reading the request's body, bounded in size and time, and what the headers must say about it.

The same ``receive`` serves the body first and the watch for the client's leaving afterwards, so nothing else may
call it. A body must come within ``read_timeout_s`` plus one second per 64 KiB received: slow links have their time,
a client that trickles bytes does not.
"""

from __future__ import annotations

import anyio

from aserve.core.errors import (
    GenerationClosedError,
    InvalidRequestError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
)
from aserve.server.asgi import Receive, RequestHead

SLOWEST_BYTES_PER_S = 64 * 1024


def check_content_type(head: RequestHead) -> None:
    """Refuse what is not plain UTF-8 JSON by its headers. Raises UnsupportedMediaTypeError."""
    kind, *parameters = (head.header(b"content-type") or b"").decode("latin-1").lower().split(";")
    if kind.strip() != "application/json":
        raise UnsupportedMediaTypeError("the content type must be application/json")
    for parameter in parameters:
        name, _, value = parameter.strip().partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8", "us-ascii"):
            raise UnsupportedMediaTypeError("the charset of the request must be UTF-8")
    if (head.header(b"content-encoding") or b"identity").lower() not in (b"identity", b""):
        raise UnsupportedMediaTypeError("compressed request bodies are not supported; send the body as it is")


class RequestBody:
    """The body of one request.

    Attributes:
        complete: whether all of it has been received.
    """

    def __init__(self, head: RequestHead, receive: Receive, *, max_bytes: int, timeout_s: float) -> None:
        self._head = head
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self.complete = False

    async def read(self) -> bytes:
        """Return the whole body.

        Raises PayloadTooLargeError (by the announced length before reading), RequestTimeoutError, and
        GenerationClosedError when the client leaves.
        """
        self._check_announced()
        parts: list[bytes] = []
        size = 0
        started = anyio.current_time()
        while not self.complete:
            left = started + self._timeout_s + size / SLOWEST_BYTES_PER_S - anyio.current_time()
            with anyio.move_on_after(max(left, 0.0)) as limit:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise GenerationClosedError("the client left while sending its request")
                part = message.get("body", b"")
                size += len(part)
                if size > self._max_bytes:
                    raise self._too_large()
                parts.append(part)
                self.complete = not message.get("more_body", False)
                continue
            if limit.cancelled_caught:
                raise RequestTimeoutError("the request's body did not arrive in time")
        return b"".join(parts)

    def _check_announced(self) -> None:
        announced = self._head.header(b"content-length")
        if announced is None:
            return
        if not announced.isdigit():
            raise InvalidRequestError("the content length is not a number")
        if len(announced) > 18 or int(announced) > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the request body is larger than the limit of {self._max_bytes} bytes")
