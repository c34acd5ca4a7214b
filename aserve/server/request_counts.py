"""Counts HTTP requests by route, status and outcome. All three come from fixed sets, whatever clients send."""

from __future__ import annotations

from collections.abc import Mapping

OTHER_ROUTE = "other"


class RequestCounts:
    """Written by the routes, read by ``/metrics``.

    Attributes:
        num_active: requests of the generation routes that have not ended.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[str, int, str], int] = {}
        self.num_active = 0

    def add(self, route: str, status: int, outcome: str) -> None:
        key = (route, status, outcome)
        self._totals[key] = self._totals.get(key, 0) + 1

    @property
    def totals(self) -> Mapping[tuple[str, int, str], int]:
        """Requests by (route, status, outcome)."""
        return self._totals
