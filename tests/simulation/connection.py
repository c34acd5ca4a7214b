"""One request's two ends as an ASGI server has them, and the server that hands requests to the application.

They behave as the guarded server does: delivery of messages never waits, the disconnect is final, a complete answer
is followed by a disconnect and then by bookkeeping that must not be cancelled. What the application does wrong here
is a violation. Used by clients and by the programs.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import trio

from tests.simulation.asks import Ask

if TYPE_CHECKING:
    from tests.simulation.world import World

Message = dict[str, Any]


class Connection:
    """One exchange.

    Attributes:
        status, headers, body: the answer so far; ``started_s`` is when the application began it.
        complete: whether its last part has been taken.
        gone_s: when the client left; None while it is there.
        last_data_s: when the application gave the last part of an answer's events.
        stuck_s: when a send began that the client will never take.
        forced: whether the server was ending connections by force when the application returned.
        ended: set when the application has returned.
    """

    def __init__(self, world: World, ask: Ask) -> None:
        self._world = world
        self._ask = ask
        self._incoming: deque[Message] = deque()
        self._news = trio.Event()
        self._released = trio.Event()
        self._sending = False
        self._begun = self._finished = False
        self._num_sends = 0
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.complete = False
        self.gone_s: float | None = None
        self.last_data_s = -math.inf
        self.stuck_s: float | None = None
        self.started_s: float | None = None
        self.forced = False
        self.ended = trio.Event()

    # -- the client's end

    def feed(self, body: bytes, *, more: bool) -> None:
        self._push({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        """The client is gone, and the server knows."""
        if self.gone_s is None:
            self.gone_s = trio.current_time()
            self._released.set()
            self._incoming.clear()
            self._push({"type": "http.disconnect"})

    def _push(self, message: Message) -> None:
        self._incoming.append(message)
        self._news.set()

    # -- the application's end

    async def receive(self) -> Message:
        await trio.lowlevel.checkpoint()
        while not self._incoming:
            self._news = trio.Event()
            await self._news.wait()
        message = self._incoming[0]
        if message["type"] != "http.disconnect":
            self._incoming.popleft()
        return message

    async def send(self, message: Message) -> None:
        world, where = self._world, f"request {self._ask.index}"
        world.expect(not self._sending, f"{where}: two sends at once")
        self._sending = True
        try:
            await self._take(message, where)
        except trio.Cancelled:
            excused = self._is_hopeless or world.server.is_forced or world.was_stopped
            world.expect(excused, f"{where}: cancelled inside a send")
            raise
        finally:
            self._sending = False

    async def _take(self, message: Message, where: str) -> None:
        world = self._world
        start = message["type"] == "http.response.start"
        world.expect(start != self._begun, f"{where}: {message['type']} after status {self.status}")
        world.expect(not self._finished, f"{where}: a part after the last one")
        if not self._begun:
            self._begun, self.started_s = True, trio.current_time()
        self._finished = not start and not message.get("more_body", False)
        if b'"choices"' in message.get("body", b""):
            self.last_data_s = trio.current_time()
        await self._transmit()
        if self.gone_s is not None:
            if self._ask.raises:
                raise ConnectionResetError("the client has left")
            return
        self._num_sends += 1
        if start:
            self.status, self.headers = message["status"], dict(message["headers"])
            world.log("answers", self._ask.index, self.status)
            if world.is_busy(math.inf):  # what a refusal may be for is over before a slow client has read it
                world.busy_s = trio.current_time()
            return
        self.body += message.get("body", b"")
        if not message.get("more_body", False):
            self.complete = True
            world.log("complete", self._ask.index, len(self.body))
            self._push({"type": "http.disconnect"})
            for _ in range(world.delays.choice((0, 1, 3))):
                await trio.lowlevel.checkpoint()

    @property
    def _is_hopeless(self) -> bool:
        """Whether nobody has taken anything for so long that a send may be cut off."""
        since_s = self.stuck_s if self.gone_s is None else self.gone_s
        return since_s is not None and trio.current_time() >= since_s + 0.999

    async def _transmit(self) -> None:
        ask = self._ask
        if ask.manner == "stuck" and self._num_sends >= ask.takes_sends and self.gone_s is None:
            self.stuck_s = trio.current_time()
            await self._released.wait()
        elif ask.manner == "slow":
            with trio.move_on_after(ask.send_s):
                await self._released.wait()
        else:
            await trio.lowlevel.checkpoint()


class SimulatedServer:
    """Stands for ``GuardedServer``: its nursery, its drain and its end by force."""

    def __init__(self, app: Any, world: World) -> None:
        self.app = app
        self._world = world
        self._nursery: trio.Nursery | None = None
        self._connections = trio.CancelScope()
        self._stopped = trio.Event()
        self._open: list[Connection] = []
        self._changed = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``stop``."""
        try:
            with self._connections:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    task_status.started()
                    await self._accept()
        finally:
            self._nursery = None

    async def _accept(self) -> None:
        """Until the end; one by force tells the applications that their connections are gone."""
        try:
            await self._stopped.wait()
            while self._open:
                self._changed = trio.Event()
                await self._changed.wait()
        finally:
            for connection in list(self._open):
                connection.leave()

    async def wind_down(self) -> None:
        """Connections take no more requests; here each has one."""
        await trio.lowlevel.checkpoint()

    def stop(self, grace_s: float) -> None:
        self._connections.deadline = trio.current_time() + grace_s
        self._stopped.set()

    def open(self, connection: Connection, scope: dict[str, Any]) -> bool:
        """Hand a request to the application; False if no connections are accepted (any more)."""
        if self._nursery is None or self._stopped.is_set():
            return False
        self._open.append(connection)
        self._nursery.start_soon(self._serve, connection, scope)
        return True

    @property
    def is_forced(self) -> bool:
        """Whether connections are being ended with answers on their way."""
        return self._connections.cancel_called or self._world.is_over

    def abort(self) -> None:
        """End every connection at once."""
        self._stopped.set()
        self._connections.cancel()

    async def _serve(self, connection: Connection, scope: dict[str, Any]) -> None:
        try:
            await self.app(scope, connection.receive, connection.send)
        except Exception as error:
            self._world.expect(False, f"the application raised {error!r}")
        finally:
            connection.forced = self.is_forced
            connection.ended.set()
            self._open.remove(connection)
            self._changed.set()
