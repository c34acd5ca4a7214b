"""How fast work drains, measured: the time after which a refused client should come back.

Counts ends within one busy period, so that an idle hour does not look like a slow one. Pure; times are given. Used by
the engine's statistics and by the server's limits per API key.
"""

from __future__ import annotations

from collections import deque

_NUM_REMEMBERED = 64
_MAX_WAIT_S = 60.0
_NOT_MEASURED_S = 1.0


class DrainRate:
    """The rate of the most recent ends."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._begin_s: float | None = None
        self._earlier_each_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Work has come to something idle: the time since its last end says nothing about its speed."""
        self._earlier_each_s = self._each_s(self._ends_s[-1]) if self._ends_s else self._earlier_each_s
        self._ends_s.clear()
        self._begin_s = now_s

    def note(self, num_ends: int, now_s: float) -> None:
        """So many pieces of work have ended."""
        self._ends_s.extend([now_s] * num_ends)

    def wait_s(self, num_ahead: int, now_s: float) -> float:
        """Estimate, in whole seconds from 1 to 60, when so many pieces will have ended at the recent rate."""
        each_s = self._each_s(now_s) or self._earlier_each_s
        if each_s is None:
            return _NOT_MEASURED_S
        return float(min(max(1, -(-num_ahead * each_s // 1)), _MAX_WAIT_S))

    def _each_s(self, now_s: float) -> float | None:
        """Seconds per end, up to now: a standstill counts."""
        if not self._ends_s:
            return None
        full = len(self._ends_s) == _NUM_REMEMBERED
        start_s = self._ends_s[0] if full or self._begin_s is None else self._begin_s
        return max(now_s - start_s, 1e-3) / len(self._ends_s)
