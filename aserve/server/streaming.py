"""The generation routes, ``/v1/chat/completions`` and ``/v1/completions``: from ASGI messages to answers.

Plain ASGI on purpose: the request's scope encloses status, headers and body, so what goes wrong before the first
byte is an HTTP status and nothing outlives its request. Generations are left, and their KV cache is free, before
the last bytes are sent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from aserve.core.config import ServerConfig
from aserve.core.request import TextDelta
from aserve.server.asgi import Receive, RequestHead, Send
from aserve.server.auth import Caller
from aserve.server.deadlines import NEVER, TimeLimits
from aserve.server.deltas import DeltaSource, source_of
from aserve.server.ingress import Ingress, Sender
from aserve.server.json_body import parse_with
from aserve.server.prepare import Job
from aserve.server.record import RequestRecord
from aserve.server.reply import Reply
from aserve.server.request_scope import RequestScope
from aserve.server.sse import ChatFrames, CompletionFrames
from aserve.server.usage import Usage
from aserve.server.whole import WholeAnswer

if TYPE_CHECKING:
    from aserve.engine.engine import Engine

R = TypeVar("R")
_JSON = (b"content-type", b"application/json")


class GenerationRoute(Generic[R]):
    """One route. ``read`` checks a body, ``prepare`` makes it a job for the engine."""

    def __init__(
        self,
        ingress: Ingress,
        server: ServerConfig,
        *,
        read: Callable[[bytes], R],
        prepare: Callable[[Engine, R], Awaitable[Job]],
    ) -> None:
        self._ingress = ingress
        self._server = server
        self._read = read
        self._prepare = prepare

    async def __call__(self, head: RequestHead, receive: Receive, send: Send, caller: Caller) -> None:
        """Answer one POST request."""
        await self._ingress.run(head, receive, send, caller, self._sender)

    def _sender(self, engine: Engine, raw: bytes, record: RequestRecord, limits: TimeLimits) -> Sender:
        make_job = partial(self._job, engine, raw)
        return _Exchange(engine, make_job, record, headers_wait_s=self._wait_s(limits)).serve

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
        with scope.interruptible():
            job = await self._make_job()
        del self._make_job  # and with it the request's body
        self._record.answer_id = job.id
        usage = self._record.usage = Usage(job.num_prompt_tokens, job.num_choices)
        await (self._stream if job.stream else self._whole)(scope, job, usage)

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


async def _next(source: DeltaSource) -> list[TextDelta]:
    deltas = await source.next_deltas()
    if not deltas:
        raise RuntimeError("the generation ended before its choices did")
    return deltas
