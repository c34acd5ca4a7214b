"""Keeps a foreign app's cancellations out of ``send()``.

Servers do their bookkeeping inside ``send`` (delivering disconnects, recycling the connection, arming its idle timer),
and an app that is cancelled there leaves it undone. QuartTrio cancels its handler in the last ``send`` of every answer.
Wrapped around such apps when they are served by something other than the guard. Knows only anyio and ASGI.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class ShieldSend:
    """``app``, whose sends run to their end whatever is cancelled meanwhile, but for at most ``limit_s`` seconds.

    After a send that was cut by the limit, the cancellation that waited, if any, takes effect as usual.
    """

    def __init__(self, app: App, limit_s: float = 30.0) -> None:
        self._app = app
        self._limit_s = limit_s

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def shielded(message: Message) -> None:
            with anyio.move_on_after(self._limit_s, shield=True):
                await send(message)

        await self._app(scope, receive, shielded)
