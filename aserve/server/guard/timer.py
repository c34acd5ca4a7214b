"""One alarm clock per connection, set from anywhere without waiting.

Hypercorn starts and cancels a task for each idle period, with a lock and checkpoints that a cancelled app skips: the
idle timer is then never armed. Setting this one is an assignment. Used by ``connection``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf

import trio


class Timer:
    """Calls ``action`` at the earliest time asked for (trio's clock); asking again is the action's business."""

    def __init__(self, action: Callable[[], Awaitable[None]]) -> None:
        self._action = action
        self._at = inf
        self._sleep: trio.CancelScope | None = None

    def call_at(self, at: float) -> None:
        """Make sure that the action is called at ``at`` or before."""
        if at < self._at:
            self._at = at
            if self._sleep is not None:
                self._sleep.deadline = at

    async def run(self) -> None:
        """Sleep and call, as long as the connection lives."""
        while True:
            with trio.CancelScope(deadline=self._at) as self._sleep:
                await trio.sleep_forever()
            self._sleep, self._at = None, inf
            await self._action()
