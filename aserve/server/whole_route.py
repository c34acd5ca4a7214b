"""POST routes that are answered in one piece: vectors, scores, token ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from aserve.server.asgi import Receive, RequestHead, Send
from aserve.server.auth import Caller
from aserve.server.deadlines import TimeLimits
from aserve.server.ingress import Ingress, Sender
from aserve.server.json_body import parse_with
from aserve.server.record import RequestRecord
from aserve.server.reply import Reply
from aserve.server.request_scope import RequestScope

if TYPE_CHECKING:
    from aserve.engine.engine import Engine

R = TypeVar("R")


class Exchange:
    """One request, as far as whoever makes its answer has to know it.

    Attributes:
        scope: closes what is attached to it when the request is over.
        record: what the log and the metrics are told.
        caller: whose request it is.
    """

    def __init__(self, scope: RequestScope, record: RequestRecord, caller: Caller) -> None:
        self.scope = scope
        self.record = record
        self.caller = caller


class WholeRoute(Generic[R]):
    """One route. ``read`` checks a body, ``make`` makes the answer; both raise AserveError for what is wrong."""

    def __init__(
        self,
        ingress: Ingress,
        *,
        read: Callable[[bytes], R],
        make: Callable[[Engine, R, Exchange], Awaitable[Reply]],
    ) -> None:
        self._ingress = ingress
        self._read = read
        self._make = make

    async def __call__(self, head: RequestHead, receive: Receive, send: Send, caller: Caller) -> None:
        """Answer one POST request."""
        await self._ingress.run(head, receive, send, caller, partial(self._sender, caller))

    def _sender(self, caller: Caller, engine: Engine, raw: bytes, record: RequestRecord, limits: TimeLimits) -> Sender:
        bodies = [raw]

        async def send(scope: RequestScope) -> None:
            with scope.interruptible():
                request = await parse_with(self._read, bodies.pop())
            reply = await self._make(engine, request, Exchange(scope, record, caller))
            record.close(reply.status, "ok")
            await scope.out.reply(reply)

        return send
