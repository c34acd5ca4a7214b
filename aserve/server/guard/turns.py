"""How much of the event loop noisy clients may have, all of them together.

A connection that sends frames which carry nothing is ended in time (``lenient_h2.Calm``), but a hundred of them, each
begun anew when it is ended, would keep the loop busy with nothing else. So whoever is noisy waits after each of its
reads for three times as long as the server has worked on it, one after the other, but for no longer than 5 s: beyond
some hundreds of them the share grows, so that a client that is noisy for a good reason is late and not starved. Made by
``server``, used by ``connection``.
"""

from __future__ import annotations

import trio

_REST = 3.0
_LONGEST_WAIT_S = 5.0


class Turns:
    """Shared by the connections of a server: a third of the time at most goes to those that call ``give_way``."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def give_way(self, worked_s: float) -> None:
        """Wait until everybody who called before has rested, and then for one's own work."""
        now = trio.current_time()
        self._free_at = min(max(self._free_at, now) + _REST * worked_s, now + _LONGEST_WAIT_S)
        await trio.sleep_until(self._free_at)
