"""How the engine is: loading, running, draining, closed or dead; and who waits for a change of that.

Fed by the router with the step thread's life signs, read by the engine and the local client. On the event loop only.
"""

from __future__ import annotations

from typing import Literal

import anyio

from aserve.core.capacity import Capacity
from aserve.core.errors import EngineDeadError, EngineDrainingError
from aserve.engine.messages import Failed, LifeSign, Loaded, Stopped

Status = Literal["running", "draining", "closed", "dead"]

ENGINE_DEAD = "the engine has failed and serves no more requests"


class Lifecycle:
    """State that only goes forward."""

    def __init__(self) -> None:
        self.capacity: Capacity | None = None
        self.failure: BaseException | None = None
        self._retry_after_s: float | None = None  # set: draining
        self._is_closed = False
        self._started = anyio.Event()
        self._dead = anyio.Event()
        self._stopped = anyio.Event()

    def receive(self, sign: LifeSign) -> None:
        match sign:
            case Loaded(capacity):
                self.capacity = capacity
                self._started.set()
            case Failed(error):
                self.failure = self.failure or error
                self._started.set()
                self._dead.set()
            case Stopped():
                self._stopped.set()

    def start_draining(self, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s

    def close(self) -> None:
        """Its scope is being left: nothing will ever run here again."""
        self._is_closed = True

    @property
    def status(self) -> Status:
        if self.failure is not None:
            return "dead"
        if self._is_closed:
            return "closed"
        return "running" if self._retry_after_s is None else "draining"

    def refuse_unless_running(self) -> None:
        """Raise EngineDeadError or EngineDrainingError if nothing is admitted (any more)."""
        match self.status:
            case "running":
                return
            case "draining":
                text = "the server is shutting down and takes no new requests"
                raise EngineDrainingError(text, retry_after_s=self._retry_after_s)
            case "closed":
                raise EngineDrainingError("the engine has been closed and serves no more requests")
            case "dead":
                raise EngineDeadError(ENGINE_DEAD)

    @property
    def has_started(self) -> bool:
        """Whether loading is over, well or not."""
        return self._started.is_set()

    @property
    def has_stopped(self) -> bool:
        return self._stopped.is_set()

    async def wait_started(self) -> Capacity:
        """Wait for the end of loading. Raises what loading raised."""
        await self._started.wait()
        if self.capacity is None:
            assert self.failure is not None
            raise self.failure
        return self.capacity

    async def wait_dead(self) -> None:
        await self._dead.wait()

    async def wait_stopped(self) -> None:
        await self._stopped.wait()
