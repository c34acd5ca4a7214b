"""A small ASGI application with one route per way in which apps behave, and a count of what still runs."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs

import trio

CHUNK = b"data: " + b"x" * 140 + b"\n\n"


class App:
    def __init__(self) -> None:
        self.running = 0
        self.sent = 0  # body bytes that `send` took
        self.told = 0  # handlers that saw http.disconnect before they were done
        self.seen: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        query = {k: float(v[0]) for k, v in parse_qs(scope["query_string"].decode()).items()}
        handler = getattr(self, scope["path"].strip("/").replace("-", "_") or "ok", self.missing)
        self.seen.append(scope["path"])
        if handler == self.count:
            await handler(receive, send)
            return
        self.running += 1
        try:
            await handler(receive, send, **query)
        finally:
            self.running -= 1

    async def _start(self, send: Any, status: int = 200, **headers: str) -> None:
        items = [(k.encode(), v.encode()) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": items})

    async def _body(self, send: Any, body: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self.sent += len(body)

    async def _reply(self, send: Any, status: int, body: bytes) -> None:
        await self._start(send, status, **{"content-length": str(len(body))})
        await self._body(send, body, more=False)

    async def ok(self, receive: Any, send: Any) -> None:
        await self._reply(send, 200, b"ok")

    async def missing(self, receive: Any, send: Any, **_: float) -> None:
        await self._reply(send, 404, b"missing")

    async def count(self, receive: Any, send: Any) -> None:
        numbers = {"running": self.running, "sent": self.sent, "told": self.told}
        await self._reply(send, 200, json.dumps(numbers).encode())

    async def read(self, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message["body"])
            more = message["more_body"]
        await self._reply(send, 200, b"%d" % size)

    async def parts(self, receive: Any, send: Any) -> None:
        """In how many pieces the body came."""
        number, more = 0, True
        while more:
            message = await receive()
            number += bool(message["body"])
            more = message["more_body"]
        await self._reply(send, 200, b"%d" % number)

    async def early(self, receive: Any, send: Any) -> None:
        await self._reply(send, 413, b"too large")

    async def fail(self, receive: Any, send: Any) -> None:
        raise RuntimeError("before the answer")

    async def fail_late(self, receive: Any, send: Any) -> None:
        await self._start(send)
        await self._body(send, CHUNK)
        raise RuntimeError("within the answer")

    async def unfinished(self, receive: Any, send: Any) -> None:
        await self._start(send)
        await self._body(send, CHUNK)

    async def raw(self, receive: Any, send: Any, n: float = 100, ms: float = 10) -> None:
        """No watcher: runs to its end whatever the client does."""
        await self._start(send)
        for _ in range(int(n)):
            await self._body(send, CHUNK)
            await trio.sleep(ms / 1000)
        await self._body(send, b"", more=False)

    async def flood(self, receive: Any, send: Any, kib: float = 4096) -> None:
        """As much as `send` takes, until the client leaves."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, receive, nursery.cancel_scope.cancel)
            await self._start(send)
            for _ in range(int(kib / 4)):
                await self._body(send, b"f" * 4096)
            await self._body(send, b"", more=False)
            nursery.cancel_scope.cancel()

    async def stuck(self, receive: Any, send: Any, kib: float = 4096) -> None:
        """The same in a shield without a deadline, and nobody watches."""
        with trio.CancelScope(shield=True):
            await self._start(send)
            for _ in range(int(kib / 4)):
                await self._body(send, b"f" * 4096)
            await self._body(send, b"", more=False)

    async def watch(self, receive: Any, send: Any, n: float = 100, ms: float = 10) -> None:
        """Cancelled wherever it is when the disconnect comes, as QuartTrio does it: also inside its last send."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, receive, nursery.cancel_scope.cancel)
            await self._start(send)
            for _ in range(int(n)):
                await self._body(send, CHUNK)
                await trio.sleep(ms / 1000)
            await self._body(send, CHUNK, more=False)
            await trio.sleep_forever()  # the disconnect that follows the answer ends it

    async def _watch(self, receive: Any, then: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.told += 1
        then()

    async def prefill(self, receive: Any, send: Any, ms: float = 5000) -> None:
        """Says nothing for a while; ends early when the client leaves."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, receive, nursery.cancel_scope.cancel)
            await trio.sleep(ms / 1000)
            await self._reply(send, 200, b"done")
            nursery.cancel_scope.cancel()

    async def stream(self, receive: Any, send: Any, n: float = 100, ms: float = 10, wait: float = 0) -> None:
        """The pattern of aserve's own routes: closing wakes the sender, which runs in one shield."""
        closed = trio.Event()

        async def watch() -> None:
            try:
                while (await receive())["type"] != "http.disconnect":
                    pass
            finally:
                closed.set()
                shield.deadline = trio.current_time() + 1

        async with trio.open_nursery() as nursery:
            with trio.CancelScope(shield=True) as shield:
                nursery.start_soon(watch)
                with trio.move_on_after(wait / 1000):
                    await closed.wait()
                if not closed.is_set():
                    await self._stream(send, closed, int(n), ms)
            nursery.cancel_scope.cancel()

    async def _stream(self, send: Any, closed: trio.Event, n: int, ms: float) -> None:
        await self._start(send)
        for _ in range(n):
            with trio.move_on_after(ms / 1000):
                await closed.wait()
            if closed.is_set():
                return
            await self._body(send, CHUNK)
        await self._body(send, b"data: [DONE]\n\n", more=False)
