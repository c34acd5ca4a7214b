"""Counts HTTP requests by route, status and outcome. All three come from fixed sets, whatever clients send."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import anyio

OTHER_ROUTE = "other"


class RequestCounts:
    """Written by the routes, read by ``/metrics``.

    Attributes:
        num_active: requests of the generation routes that have not ended.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[str, int, str], int] = {}
        self.num_active = 0
        self._none_active: anyio.Event | None = None

    @contextmanager
    def active(self) -> Generator[None]:
        """A request of a generation route, from its first to its last byte."""
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1
            if not self.num_active and self._none_active is not None:
                self._none_active.set()
                self._none_active = None

    async def wait_none_active(self) -> None:
        """Wait until every request of the generation routes has ended, which includes that its answer was sent."""
        while self.num_active:
            if self._none_active is None:
                self._none_active = anyio.Event()
            await self._none_active.wait()

    def add(self, route: str, status: int, outcome: str) -> None:
        key = (route, status, outcome)
        self._totals[key] = self._totals.get(key, 0) + 1

    @property
    def totals(self) -> Mapping[tuple[str, int, str], int]:
        """Requests by (route, status, outcome)."""
        return self._totals
