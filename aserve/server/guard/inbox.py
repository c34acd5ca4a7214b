"""What one app is told: a queue that its connection fills without ever waiting.

Hypercorn delivers to the app through a bounded channel, from whatever task noticed the event: an app that does not
read blocks its whole connection, and a cancelled deliverer loses a disconnect for good. Here delivery is synchronous,
the disconnect is final, and what bounds the queue is flow control: the protocols read ``size``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio

Message = dict[str, Any]


class Inbox:
    """The messages of one app, oldest first; after the disconnect every ``receive`` returns the disconnect.

    ``on_read`` is called with the number of body bytes that the app just took, ``on_wait`` when it waits for some.
    Parts of the body that nobody has taken yet are one message: a peer that sends single bytes costs no more memory.
    """

    def __init__(self, on_read: Callable[[int], None], on_wait: Callable[[], Awaitable[None]] | None = None) -> None:
        self._on_read = on_read
        self._on_wait = on_wait
        self._messages: deque[Message] = deque()
        self._arrived = trio.Event()
        self._disconnected = False
        self._told = False
        self.size = 0  # body bytes that wait

    async def put(self, message: Message) -> None:
        """Deliver; a coroutine function only because hypercorn awaits it. Contains no checkpoint."""
        if message["type"] == "http.disconnect":
            self.disconnect()
        elif not self._disconnected:
            body = message.get("body", b"")
            if self._messages:
                last = self._messages[-1]
                last["body"] += body
                last["more_body"] = message.get("more_body", False)
            else:
                self._messages.append({**message, "body": bytearray(body)})
            self.size += len(body)
            self._arrived.set()

    def disconnect(self) -> None:
        """The peer is gone, or the answer is complete. Body parts that wait are dropped."""
        if not self._disconnected:
            self._disconnected = True
            self._messages.clear()
            taken, self.size = self.size, 0
            self._arrived.set()
            self._on_read(taken)

    async def receive(self) -> Message:
        """The ASGI receive callable. Does not yield while something is ready, so that polling it works."""
        while not self._messages:
            if self._disconnected:
                if self._told:
                    await trio.lowlevel.checkpoint()  # an app that goes on asking must not starve the others
                self._told = True
                return {"type": "http.disconnect"}
            if self._on_wait is not None:
                await self._on_wait()
            self._arrived = trio.Event()
            await self._arrived.wait()
        message = self._messages.popleft()
        message["body"] = bytes(message["body"])
        taken = len(message["body"])
        if taken:
            self.size -= taken
            self._on_read(taken)
        return message
