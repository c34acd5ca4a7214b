"""Requests to the application without a connection: what a file of them is answered with.

One whole answer each; the client neither leaves nor reads slowly. Called by ``aserve run-batch``.
"""

from __future__ import annotations

import anyio

from aserve.server.asgi import ASGIApp, Message, RawHeaders, Scope


async def ask(app: ASGIApp, path: str, body: bytes, headers: RawHeaders) -> tuple[int, bytes]:
    """POST ``body`` and wait for all of the answer: its status and its body."""
    exchange = _Exchange(body)
    await app(_scope(path, [*headers, (b"content-length", b"%d" % len(body))]), exchange.receive, exchange.send)
    return exchange.status, bytes(exchange.body)


class _Exchange:
    """The two ends of one request."""

    def __init__(self, body: bytes) -> None:
        self._incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._answered = anyio.Event()
        self.status = 0
        self.body = bytearray()

    async def receive(self) -> Message:
        if self._incoming:
            return self._incoming.pop()
        await self._answered.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.body += message.get("body", b"")
        if not message.get("more_body", False):
            self._answered.set()


def _scope(path: str, headers: RawHeaders) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost"), *headers],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
    }
