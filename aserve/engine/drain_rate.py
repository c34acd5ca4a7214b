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
    """The rate of the most recent ends.

    Remembers moments, not single ends: one step can end hundreds of sequences, and the time that these took is the time
    since the moment before.
    """

    def __init__(self) -> None:
        self._moments: deque[tuple[float, int]] = deque(maxlen=_NUM_REMEMBERED)  # the first only begins the time
        self._earlier_each_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Work has come to something idle: the time since its last end says nothing about its speed."""
        if self._moments:
            self._earlier_each_s = self._each_s(self._moments[-1][0]) or self._earlier_each_s
        self._moments.clear()
        self._moments.append((now_s, 0))

    def note(self, num_ends: int, now_s: float) -> None:
        """So many pieces of work have ended, all at this moment."""
        self._moments.append((now_s, num_ends))

    def wait_s(self, num_ahead: int, now_s: float) -> float:
        """Estimate, in whole seconds from 1 to 60, when so many pieces will have ended at the recent rate."""
        each_s = self._each_s(now_s) or self._earlier_each_s
        if each_s is None:
            return _NOT_MEASURED_S
        return float(min(max(1, -(-num_ahead * each_s // 1)), _MAX_WAIT_S))

    def _each_s(self, now_s: float) -> float | None:
        """Seconds per end, up to now: a standstill counts."""
        if len(self._moments) < 2:
            return None
        start_s, num_before = self._moments[0]
        num_ends = sum(num for _, num in self._moments) - num_before
        return max(now_s - start_s, 1e-3) / num_ends
