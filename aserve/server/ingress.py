"""What is the same for all POST routes: the body, the time limits, the request's scope, and how it fails.

Plain ASGI on purpose: the request's scope encloses status, headers and body, so what goes wrong before the first
byte is an HTTP status and nothing outlives its request. What is answered, and how, is each route's own.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import anyio

from aserve.core.config import ServerConfig
from aserve.core.errors import AserveError, GenerationClosedError
from aserve.server.asgi import Receive, RequestHead, Send
from aserve.server.auth import Caller
from aserve.server.body import RequestBody, check_content_type
from aserve.server.deadlines import Deadlines, TimeLimits
from aserve.server.engine_slot import EngineSlot
from aserve.server.record import RequestRecord
from aserve.server.reply import answer, drain_time, error_reply, internal_error
from aserve.server.request_counts import RequestCounts
from aserve.server.request_scope import RequestScope
from aserve.server.running import RunningRequests
from aserve.server.sse import error_event

if TYPE_CHECKING:
    from aserve.engine.engine import Engine

logger = logging.getLogger(__name__)

Sender = Callable[[RequestScope], Awaitable[None]]
"""Answers within a scope. May raise whatever goes wrong."""

MakeSender = Callable[["Engine", bytes, RequestRecord, TimeLimits], Sender]
"""Makes the sender for a body that has been read; reading what it says is the sender's work."""


class Ingress:
    """The way in of one route.

    Args:
        is_work: whether its requests count for what one caller may have in progress.
    """

    def __init__(
        self,
        path: str,
        slot: EngineSlot,
        server: ServerConfig,
        counts: RequestCounts,
        running: RunningRequests,
        *,
        is_work: bool = True,
    ) -> None:
        self._path = path
        self._slot = slot
        self._server = server
        self._counts = counts
        self._running = running
        self._is_work = is_work

    async def run(
        self, head: RequestHead, receive: Receive, send: Send, caller: Caller, make_sender: MakeSender
    ) -> None:
        """Answer one POST request."""
        with self._counts.active():
            await self._run(head, receive, send, caller, make_sender)

    async def _run(
        self, head: RequestHead, receive: Receive, send: Send, caller: Caller, make_sender: MakeSender
    ) -> None:
        record = RequestRecord(head, self._path, self._counts)
        body = RequestBody(head, receive, max_bytes=self._server.max_body_bytes, timeout_s=self._server.read_timeout_s)
        try:
            engine = self._slot.get_serving()
            check_content_type(head)
            limits = TimeLimits.of(self._server, head)
            raw = await _read(body, limits, record.started_s)
            if self._is_work:
                caller.refuse_if_busy()  # after the body, so that the connection stays in step
        except AserveError as error:
            record.close_with(error)
            rest = not body.complete and not isinstance(error, GenerationClosedError)
            await answer(head, error_reply(error), receive, send, body_complete=not rest, drain_s=drain_time(error))
        else:
            scope = RequestScope(
                head,
                receive,
                send,
                deadlines=Deadlines(limits, record.started_s, retry_after_s=engine.retry_after_s),
                stall_s=self._server.stall_timeout_s,
                keepalive_s=self._server.sse_keepalive_s,
            )
            sender = make_sender(engine, raw, record, limits)
            del raw  # large ones must not stay as long as the answer takes
            counted = caller.request() if self._is_work else nullcontext()
            with counted, self._running.running(record, caller, scope):
                await scope.run(_Guarded(sender, record))
        finally:
            record.close(499, "abandoned")


class _Guarded:
    """A sender whose failures have become answers."""

    def __init__(self, sender: Sender, record: RequestRecord) -> None:
        self._sender = sender
        self._record = record

    async def __call__(self, scope: RequestScope) -> None:
        try:
            await self._sender(scope)
        except AserveError as error:
            await self._fail(scope, error)
        except Exception:
            logger.exception("a request failed: %s", self._record.request_id)
            await self._fail(scope, internal_error())

    async def _fail(self, scope: RequestScope, error: AserveError) -> None:
        """Answer with the error in the form that is still possible. A client that is gone gets a formal one."""
        self._record.close_with(error)
        out = scope.out
        try:
            if not out.started:
                await out.reply(error_reply(error))
            elif out.stream and not out.finished and not scope.gone:
                await out.write(error_event(error), last=True)
        except GenerationClosedError:
            logger.debug("a client left before it could be told of %s", error.code)


async def _read(body: RequestBody, limits: TimeLimits, started_s: float) -> bytes:
    """The body, within the whole time of its request. Raises what ``RequestBody.read`` does, DeadlineExceededError."""
    with anyio.CancelScope(deadline=started_s + limits.total_s):
        return await body.read()
    raise limits.exceeded()
