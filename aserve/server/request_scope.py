"""The scope of one request: a nursery of a watcher, timers and the sender, and one way to end it.

The pattern: whatever ends a request early (the client leaves, a deadline, a stuck client, shutdown) *closes* it:
its generations are closed with a reason and left, so that their KV cache is free at once, and the sender, if it waits
for them, wakes. Nothing is ever thrown into ``send``: servers lose track of their connections when that happens, so a
stuck one may hold the sender, but nothing of the engine. The sender runs in one
shield, whose deadline is set once the peer is gone, so that a stuck send cannot hold the task.
Used by the generation routes only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import anyio
import anyio.abc

from aserve.core.errors import AserveError, GenerationClosedError
from aserve.server.asgi import Receive, RequestHead, Send
from aserve.server.deadlines import Deadlines, Timed
from aserve.server.outgoing import Outgoing

GRACE_S = 1.0
_TICKS = 4  # how often timers look, within the time that they measure


class Closable(Timed, Protocol):
    """What can be ended with a reason: a generation."""

    def close(self, error: AserveError) -> None: ...

    def leave(self) -> None:
        """Give back what it holds of the engine. Synchronous and idempotent."""
        ...


class RequestScope:
    """One request's nursery.

    Args:
        deadlines: the request's time limits.
        stall_s: a send stuck for this long counts as a client that is gone.
        keepalive_s: comments are sent this often while a stream is silent; 0 for none.

    Attributes:
        error: why the request was closed; None while it was not.
        gone: whether nobody reads the answer any more.
    """

    def __init__(
        self,
        head: RequestHead,
        receive: Receive,
        send: Send,
        *,
        deadlines: Deadlines,
        stall_s: float,
        keepalive_s: float,
    ) -> None:
        self._receive = receive
        self._deadlines = deadlines
        self._stall_s = stall_s
        self._keepalive_s = keepalive_s
        self._closables: list[Closable] = []
        self._shield = anyio.CancelScope(shield=True)
        self._ping_scope = anyio.CancelScope(shield=True)
        self._interruptible: anyio.CancelScope | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self.out = Outgoing(head, send)
        self.error: AserveError | None = None
        self.gone = False

    async def run(self, work: Callable[[RequestScope], Awaitable[None]]) -> None:
        """Run ``work`` as the sender. ``work`` must not raise."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._watch)
            tasks.start_soon(self._deadlines.run, self.close)
            tasks.start_soon(self._watch_sends)
            with self._shield:
                await work(self)
                await self.out.ping_done()
            self._ping_scope.cancel()
            tasks.cancel_scope.cancel()

    def close(self, error: AserveError, *, gone: bool = False) -> None:
        """End the request with a reason; the first one counts. Synchronous, idempotent, from any of its tasks."""
        if self.error is None:
            self.error = error
            for closable in self._closables:
                closable.close(error)
                closable.leave()
            if self._interruptible is not None:
                self._interruptible.cancel()
        if gone and not self.gone:
            self.gone = True
            self._shield.deadline = self._ping_scope.deadline = anyio.current_time() + GRACE_S

    def attach(self, closable: Closable) -> None:
        """Close this, too, when the request is closed, and time it. Raises the reason if it has been already."""
        self.check()
        self._closables.append(closable)
        self._deadlines.watch(closable)

    @contextmanager
    def until_begun(self, limit_s: float) -> Generator[None]:
        """A wait that ends when all that is attached has begun, and after a limit: silently."""
        with anyio.move_on_after(limit_s) as wait:
            self._deadlines.when_begun(wait.cancel)
            yield

    def check(self) -> None:
        """Raise the reason if the request has been closed."""
        if self.error is not None:
            raise self.error

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """A stretch without sends that closing may interrupt. Raises the reason then, or if already closed."""
        self.check()
        try:
            with anyio.CancelScope() as self._interruptible:
                yield
        finally:
            self._interruptible = None
        self.check()

    async def start_stream(self) -> None:
        """Send the headers of an event stream and keep it alive from then on."""
        await self.out.start_stream()
        if self._keepalive_s:
            self.start_soon(self._keep_alive)

    def start_soon(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a helper of the sender in the nursery; it is cancelled when the sender is done."""
        assert self._tasks is not None
        self._tasks.start_soon(task)

    async def _watch(self) -> None:
        """Learn that the client left; also runs into its end when the nursery is cancelled from outside."""
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        finally:
            self.close(GenerationClosedError("the client left before the answer was complete"), gone=True)

    async def _watch_sends(self) -> None:
        """Close the request when one send has been in progress for too long."""
        out, seen, since_s = self.out, (False, -1), 0.0
        while not self.gone:
            now_s = anyio.current_time()
            if (now := (out.sending, out.num_sent)) != seen:
                seen, since_s = now, now_s
            elif out.sending and now_s - since_s >= self._stall_s:
                self.close(GenerationClosedError("the client does not read its answer"), gone=True)
            await anyio.sleep(self._stall_s / _TICKS)

    async def _keep_alive(self) -> None:
        """Fill the silence of a stream with comments. A task of its own, since its send can be stuck, too."""
        out, seen, since_s = self.out, -1, 0.0
        with self._ping_scope:
            while not self.gone and not out.finished:
                now_s = anyio.current_time()
                if out.sending or out.num_sent != seen:
                    seen, since_s = out.num_sent, now_s
                elif now_s - since_s >= self._keepalive_s:
                    try:
                        await out.ping()
                    except GenerationClosedError as error:  # where a host's send raises for a lost connection
                        self.close(error, gone=True)
                    continue
                await anyio.sleep(max(self._keepalive_s / _TICKS, 0.01))
