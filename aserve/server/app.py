"""The ASGI application: a literal table of routes, and the rules that hold for all of them.

Plain ASGI at anyio level, so it runs on trio and asyncio, under hypercorn, uvicorn or mounted in another program.
Starlette and FastAPI do not run the lifespan of a mounted application: enter ``App.lifespan()`` in the host's own.
The generation routes are answered here, the small ones by a Quart front. Used by ``serve`` and by embedding programs.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from aserve.core.config import EngineConfig, ServerConfig
from aserve.core.errors import AserveError, ConfigError, MethodNotAllowedError, NotFoundError
from aserve.server.admin import Admin
from aserve.server.asgi import Receive, RequestHead, Scope, Send
from aserve.server.auth import ApiKeys, Caller
from aserve.server.chat_schema import read_chat_request
from aserve.server.completion_schema import read_completion_request
from aserve.server.cors import Cors
from aserve.server.engine_slot import EngineSlot
from aserve.server.hosts import AllowedHosts
from aserve.server.ingress import Ingress
from aserve.server.prepare import prepare_chat, prepare_completion
from aserve.server.record import RequestRecord
from aserve.server.reply import Reply, answer, error_reply
from aserve.server.request_counts import OTHER_ROUTE, RequestCounts
from aserve.server.running import RunningRequests
from aserve.server.small_routes import MODEL_PREFIX, SMALL_ROUTES, SmallRoutes
from aserve.server.streaming import GenerationRoute
from aserve.server.whole_routes import ABORT, WHOLE_ROUTES, abort_route

if TYPE_CHECKING:
    from aserve.engine.engine import Engine

logger = logging.getLogger(__name__)

OPEN_ROUTES = frozenset({"/health", "/ready", "/docs"})
"""Answered without a key: what asks is often a load balancer, or a browser, that has none."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

Route = Callable[[RequestHead, Receive, Send, Caller], Awaitable[None]]


class App:
    """The server as an ASGI 3 callable.

    Attributes:
        slot: where the engine is, or will be.
        counts: the requests so far, and how many are open.
    """

    def __init__(
        self, slot: EngineSlot, server: ServerConfig, config: EngineConfig | None = None, *, owns_listener: bool = False
    ) -> None:
        """``owns_listener`` says that the program listens on ``server.host`` itself. Raises ConfigError."""
        self.slot = slot
        self._config = config
        self.counts = RequestCounts()
        self._keys = ApiKeys(server)
        self._hosts = AllowedHosts(server, owns_listener=owns_listener)
        self._cors = Cors(server.cors_origin)
        self._small = SmallRoutes(Admin(slot, server, self.counts))
        running = RunningRequests()
        read_chat = partial(read_chat_request, unknown=server.unknown_fields)
        read_completion = partial(read_completion_request, unknown=server.unknown_fields)

        def way_in(path: str, *, is_work: bool = True) -> Ingress:
            return Ingress(path, slot, server, self.counts, running, is_work=is_work)

        self._generating: dict[str, Route] = {
            CHAT: GenerationRoute(way_in(CHAT), server, read=read_chat, prepare=prepare_chat),
            COMPLETIONS: GenerationRoute(way_in(COMPLETIONS), server, read=read_completion, prepare=prepare_completion),
            **{path: route(way_in(path)) for path, route in WHOLE_ROUTES.items()},
            ABORT: abort_route(way_in(ABORT, is_work=False), running),
        }

    @property
    def post_routes(self) -> tuple[str, ...]:
        """The paths that take POST."""
        return tuple(self._generating)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000, "reason": ""})

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """Open the engine of ``create_app(config)`` and fill the slot; without a configuration, nothing to do.

        Raises what opening the engine raises.
        """
        if self._config is None:
            yield
            return
        from aserve.assembly import open_engine

        async with open_engine(self._config) as engine:
            self.slot.fill(engine)
            try:
                yield
            finally:
                self.slot.clear()

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        started = False
        try:
            async with self.lifespan():
                started = True
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:  # hosts take an exception for an application without a lifespan, and go on
            if started:
                raise
            await send({"type": "lifespan.startup.failed", "message": _start_failure(error)})
            return
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = RequestHead.from_scope(scope)
        head = replace(head, reply_headers=[*head.reply_headers, *self._cors.reply_headers(head)])
        route = self._route_of(head.path)
        try:
            if head.path not in OPEN_ROUTES:
                self._hosts.check(head)
            if head.method == "OPTIONS":
                await self._options(head, route, receive, send)
                return
            caller = Caller() if head.path in OPEN_ROUTES else self._keys.check(head)
            self._check_method(head, route)
        except AserveError as error:
            await self._refuse(head, route, error, receive, send)
            return
        try:
            if head.path in self._generating:
                await self._generating[head.path](head, receive, send, caller)
            else:
                record = RequestRecord(head, route, self.counts, level=logging.DEBUG)
                await self._small(
                    head, scope, receive, send, lambda status: record.close(status, "ok" if status < 400 else "refused")
                )
        except OSError:
            logger.debug("a client left before it had its answer")

    def _route_of(self, path: str) -> str:
        """The route's name, from a fixed set; ``other`` for paths that are not served."""
        if path in self._generating or path in SMALL_ROUTES:
            return path
        return "/v1/models/{id}" if path.startswith(MODEL_PREFIX) and path != MODEL_PREFIX else OTHER_ROUTE

    def _allowed(self, route: str) -> tuple[str, ...]:
        return ("POST", "OPTIONS") if route in self._generating else ("GET", "HEAD", "OPTIONS")

    def _check_method(self, head: RequestHead, route: str) -> None:
        if route == OTHER_ROUTE:
            if head.method == "TRACE":
                raise MethodNotAllowedError("the method TRACE is not allowed")
            raise NotFoundError("there is no such route; paths are case-sensitive and end without a slash")
        if head.method not in self._allowed(route):
            raise MethodNotAllowedError(f"this route takes {' and '.join(self._allowed(route)[:-1])} requests only")

    async def _refuse(self, head: RequestHead, route: str, error: AserveError, receive: Receive, send: Send) -> None:
        reply = error_reply(error)
        if isinstance(error, MethodNotAllowedError):
            reply = replace(reply, headers=[*reply.headers, (b"allow", ", ".join(self._allowed(route)).encode())])
        RequestRecord(head, route, self.counts).close_with(error)
        await answer(head, reply, receive, send, body_complete=not _has_body(head))

    async def _options(self, head: RequestHead, route: str, receive: Receive, send: Send) -> None:
        if route == OTHER_ROUTE and head.path != "*":
            raise NotFoundError("there is no such route")
        methods = ", ".join(self._allowed(route)) if route != OTHER_ROUTE else "GET, HEAD, POST, OPTIONS"
        headers = [(b"allow", methods.encode()), *self._cors.preflight_headers(head, methods)]
        RequestRecord(head, route, self.counts, level=logging.DEBUG).close(204, "ok")
        await answer(head, Reply(204, b"", headers), receive, send, body_complete=not _has_body(head))


def _has_body(head: RequestHead) -> bool:
    """Whether the client may still be sending a body."""
    if head.header(b"content-length") not in (None, b"0") or head.header(b"transfer-encoding") is not None:
        return True
    return not head.is_http1 and head.method in ("POST", "PUT", "PATCH")


def _start_failure(error: BaseException) -> str:
    """Log why the engine cannot be started, and say it in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if isinstance(error, AserveError):
        logger.error("the engine cannot be started: %s", error.message)
        return error.message
    logger.error("the engine cannot be started", exc_info=error)
    return f"the engine cannot be started: {' '.join(f'{type(error).__name__}: {error}'.split())}"


def create_app(
    config: EngineConfig | None = None, *, engine: Engine | None = None, server: ServerConfig | None = None
) -> App:
    """Make an application for embedding.

    Args:
        config: the application's lifespan opens an engine by it and closes it at the end; or
        engine: a running engine, which stays the caller's.
        server: its keys, limits and timeouts count; host, port and TLS are the hosting server's.

    Raises:
        ConfigError: both or neither of ``config`` and ``engine`` were given.
    """
    if (config is None) == (engine is None):
        raise ConfigError("create_app takes either a configuration or a running engine")
    return App(EngineSlot(engine), server or ServerConfig(), config)
