"""The generation routes, ``/v1/chat/completions`` and ``/v1/completions``: from ASGI messages to answers.

Plain ASGI on purpose: the request's scope encloses status, headers and body, so what goes wrong before the first
byte is an HTTP status and nothing outlives its request. Generations are left, and their KV cache is free, before
the last bytes are sent.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from aserve.core.config import ServerConfig
from aserve.core.errors import AserveError, GenerationClosedError
from aserve.core.request import TextDelta
from aserve.server.asgi import Receive, RequestHead, Send
from aserve.server.auth import Caller
from aserve.server.body import RequestBody, check_content_type
from aserve.server.deadlines import NEVER, Deadlines, TimeLimits
from aserve.server.deltas import DeltaSource, source_of
from aserve.server.engine_slot import EngineSlot
from aserve.server.json_body import parse_with
from aserve.server.prepare import Job
from aserve.server.record import RequestRecord
from aserve.server.reply import Reply, answer, drain_time, error_reply, internal_error
from aserve.server.request_counts import RequestCounts
from aserve.server.request_scope import RequestScope
from aserve.server.sse import ChatFrames, CompletionFrames, error_event
from aserve.server.usage import Usage
from aserve.server.whole import WholeAnswer

if TYPE_CHECKING:
    from aserve.engine.engine import Engine

logger = logging.getLogger(__name__)

R = TypeVar("R")
_JSON = (b"content-type", b"application/json")


class GenerationRoute(Generic[R]):
    """One route. ``read`` checks a body, ``prepare`` makes it a job for the engine."""

    def __init__(
        self,
        path: str,
        slot: EngineSlot,
        server: ServerConfig,
        counts: RequestCounts,
        *,
        read: Callable[[bytes], R],
        prepare: Callable[[Engine, R], Awaitable[Job]],
    ) -> None:
        self._path = path
        self._slot = slot
        self._server = server
        self._counts = counts
        self._read = read
        self._prepare = prepare

    async def __call__(self, head: RequestHead, receive: Receive, send: Send, caller: Caller) -> None:
        """Answer one POST request."""
        with self._counts.active():
            await self._answer(head, receive, send, caller)

    async def _answer(self, head: RequestHead, receive: Receive, send: Send, caller: Caller) -> None:
        record = RequestRecord(head, self._path, self._counts)
        body = RequestBody(head, receive, max_bytes=self._server.max_body_bytes, timeout_s=self._server.read_timeout_s)
        try:
            engine = self._slot.get_serving()
            check_content_type(head)
            limits = TimeLimits.of(self._server, head)
            raw = await _read(body, limits, record.started_s)
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
            exchange = _Exchange(engine, partial(self._job, engine, raw), record, headers_wait_s=self._wait_s(limits))
            del raw  # large ones must not stay as long as the answer takes
            with caller.request():
                await scope.run(exchange.serve)
        finally:
            record.close(499, "abandoned")

    async def _job(self, engine: Engine, raw: bytes) -> Job:
        """Raises AserveError for whatever is wrong with the request."""
        return await self._prepare(engine, await parse_with(self._read, raw))

    def _wait_s(self, limits: TimeLimits) -> float:
        """How long a stream's headers wait until it has begun to run: so long an error can still be a status.

        Without a limit on the queue they go out at once, and the client sees that its request was taken.
        """
        return 0.0 if limits.queue_s == NEVER else self._server.sse_keepalive_s or NEVER


class _Exchange:
    """One request, as the sender of its scope."""

    def __init__(
        self,
        engine: Engine,
        make_job: Callable[[], Awaitable[Job]],
        record: RequestRecord,
        *,
        headers_wait_s: float,
    ) -> None:
        self._engine = engine
        self._make_job = make_job
        self._record = record
        self._headers_wait_s = headers_wait_s

    async def serve(self, scope: RequestScope) -> None:
        try:
            with scope.interruptible():
                job = await self._make_job()
            del self._make_job  # and with it the request's body
            usage = self._record.usage = Usage(job.num_prompt_tokens, job.num_choices)
            await (self._stream if job.stream else self._whole)(scope, job, usage)
        except AserveError as error:
            await self._fail(scope, error)
        except Exception:
            logger.exception("a request failed: %s", self._record.request_id)
            await self._fail(scope, internal_error())

    async def _stream(self, scope: RequestScope, job: Job, usage: Usage) -> None:
        kind = ChatFrames if job.chat else CompletionFrames
        frames = kind(job, usage, self._engine.tokenizer.token_bytes)
        chunk = b""
        async with self._admitted(scope, job, usage) as source:
            first: list[TextDelta] = []
            if self._headers_wait_s:
                with scope.until_begun(self._headers_wait_s):
                    first = await _next(source)
            await scope.start_stream()
            num_open = len(job.requests) * job.num_choices
            while num_open:
                chunk = b""
                deltas, first = first or await _next(source), []
                for delta in deltas:
                    usage.add(delta)
                    chunk += frames.delta(delta)
                    num_open -= delta.finish_reason is not None
                if chunk and num_open:
                    await scope.out.write(chunk)
        self._record.close(200, "ok")
        await scope.out.write(chunk + frames.end(), last=True)

    async def _whole(self, scope: RequestScope, job: Job, usage: Usage) -> None:
        whole = WholeAnswer(job, usage, self._engine.tokenizer.token_bytes)
        async with self._admitted(scope, job, usage) as source:
            num_open = len(job.requests) * job.num_choices
            while num_open:
                for delta in await _next(source):
                    usage.add(delta)
                    whole.add(delta)
                    num_open -= delta.finish_reason is not None
        reply = Reply(200, whole.body(), [_JSON])
        self._record.close(200, "ok")
        await scope.out.reply(reply)

    @asynccontextmanager
    async def _admitted(self, scope: RequestScope, job: Job, usage: Usage) -> AsyncGenerator[DeltaSource]:
        """The job's generations, all or none of them admitted. Leaving releases what they hold."""
        async with self._engine.generate_all(job.requests) as generations:
            for generation in generations:
                scope.attach(generation)
                usage.attach(generation)
            yield source_of(generations, job.num_choices, scope)

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


async def _next(source: DeltaSource) -> list[TextDelta]:
    deltas = await source.next_deltas()
    if not deltas:
        raise RuntimeError("the generation ended before its choices did")
    return deltas
