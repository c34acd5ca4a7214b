"""The Quart front of the small routes: QuartTrio under trio, Quart under asyncio, the same blueprint on both.

Quart ends a request by cancelling its handler, even inside ``send``, which loses disconnects on some servers; so it
runs behind ``ShieldSend``. Streams never pass through here. Called by the application, which has matched path and
method already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import anyio.lowlevel
import quart_trio
import trio
from quart import Blueprint, Quart, Response

from aserve.core.errors import AserveError, NotFoundError
from aserve.server.admin import Admin
from aserve.server.asgi import ASGIApp, Message, Receive, RequestHead, Scope, Send
from aserve.server.docs_page import docs_page
from aserve.server.reply import Reply, error_reply, internal_error
from aserve.server.shield import ShieldSend

logger = logging.getLogger(__name__)

MODEL_PREFIX = "/v1/models/"
SMALL_ROUTES = ("/v1/models", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/docs")


def _response(make: Callable[[], Reply]) -> Response:
    try:
        reply = make()
    except AserveError as error:
        reply = error_reply(error)
    except Exception:
        logger.exception("a small route failed")
        reply = error_reply(internal_error())
    return _as_response(reply)


def _as_response(reply: Reply) -> Response:
    response = Response(reply.body, status=reply.status)
    response.timeout = None
    for name, value in reply.headers:
        response.headers[name.decode()] = value.decode()
    return response


async def _no_such_route(_: Exception) -> Response:
    """In the usual error shape, whatever the path was (a model's name may hold slashes)."""
    return _as_response(error_reply(NotFoundError("there is no such route")))


def blueprint(admin: Admin) -> Blueprint:
    """The routes, for the server's own front; a Quart program may register them, too."""
    routes = Blueprint("aserve", __name__)

    async def models() -> Response:
        return _response(admin.models)

    async def model(model_id: str) -> Response:
        return _response(lambda: admin.model(model_id))

    async def health() -> Response:
        return _response(admin.health)

    async def ready() -> Response:
        return _response(admin.ready)

    async def metrics() -> Response:
        return _response(admin.metrics)

    async def version() -> Response:
        return _response(admin.version)

    async def openapi() -> Response:
        return _response(admin.openapi)

    async def docs() -> Response:
        return _response(docs_page)

    for path, view in zip(SMALL_ROUTES, (models, health, ready, metrics, version, openapi, docs), strict=True):
        routes.add_url_rule(path, view_func=view)
    routes.add_url_rule(MODEL_PREFIX + "<path:model_id>", view_func=model)
    return routes


class SmallRoutes:
    """Answers the small routes on either event loop."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._fronts: dict[bool, ASGIApp] = {}

    async def __call__(
        self, head: RequestHead, scope: Scope, receive: Receive, send: Send, on_start: Callable[[int], None]
    ) -> None:
        """Answer a GET or HEAD request whose path is known; ``on_start`` is told the status before it is sent."""
        inner = {**scope, "path": head.path, "raw_path": head.path.encode("utf-8", "replace"), "root_path": ""}
        await self._front()(inner, _without_body(receive), _finished_by(head, send, on_start))

    def _front(self) -> ASGIApp:
        on_trio = isinstance(anyio.lowlevel.current_token().native_token, trio.lowlevel.TrioToken)
        if on_trio not in self._fronts:
            kind = quart_trio.QuartTrio if on_trio else Quart
            app = kind("aserve.server", static_folder=None)
            app.url_map.merge_slashes = False
            app.config["RESPONSE_TIMEOUT"] = None
            app.register_blueprint(blueprint(self._admin))
            app.register_error_handler(404, _no_such_route)
            self._fronts[on_trio] = ShieldSend(cast(ASGIApp, app))
        return self._fronts[on_trio]


def _without_body(receive: Receive) -> Receive:
    """No small route has a use for a body: none is shown to Quart, and what comes is dropped."""
    begun = False

    async def wrapped() -> Message:
        nonlocal begun
        if not begun:
            begun = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return message

    return wrapped


def _finished_by(head: RequestHead, send: Send, on_start: Callable[[int], None]) -> Send:
    """Adds the request's own headers, and drops the body of an answer to HEAD."""

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            on_start(message["status"])
            message = {**message, "headers": [*message["headers"], *head.reply_headers]}
        elif head.method == "HEAD":
            if message.get("more_body", False):
                return
            message = {**message, "body": b""}
        await send(message)

    return wrapped
