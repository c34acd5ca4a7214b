"""How the engine is: loading, running, draining or dead; and who waits for a change of that.

Fed by the router with the step thread's life signs, read by the engine and the local client. On the event loop only.
"""

from __future__ import annotations

from typing import Literal

import anyio

from aserve.core.capacity import Capacity
from aserve.engine.messages import Failed, LifeSign, Loaded, Stopped

Status = Literal["running", "draining", "dead"]


class Lifecycle:
    """State that only goes forward."""

    def __init__(self) -> None:
        self.capacity: Capacity | None = None
        self.failure: BaseException | None = None
        self.retry_after_s: float | None = None  # set: draining
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

    @property
    def status(self) -> Status:
        if self.failure is not None:
            return "dead"
        return "running" if self.retry_after_s is None else "draining"

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
