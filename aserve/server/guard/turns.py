"""How much of the event loop noisy clients may have, all of them together.

A connection that sends frames which carry nothing is ended in time (``lenient_h2.Calm``), but a hundred of them, each
begun anew when it is ended, would keep the loop busy with nothing else. So whoever is noisy waits after each of its
reads for three times as long as the server has worked on it, one after the other. Made by ``server``, used by
``connection``.
"""

from __future__ import annotations

import trio

_REST = 3.0


class Turns:
    """Shared by the connections of a server: a third of the time at most goes to those that call ``give_way``."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def give_way(self, worked_s: float) -> None:
        """Wait until everybody who called before has rested, and then for one's own work."""
        self._free_at = max(self._free_at, trio.current_time()) + _REST * worked_s
        await trio.sleep_until(self._free_at)
