"""What waits to be sent on one HTTP/2 stream, with back-pressure that holds.

Hypercorn's ``StreamBuffer`` lets a sender go on whenever less than a frame was popped, which includes the case that
the peer's window is exhausted and nothing was popped at all: an unread stream grows without bound. Here a sender waits
until its bytes have really left. Filled by apps, emptied by ``http2``.
"""

from __future__ import annotations

import trio

HIGH_WATER_BYTES = 2**14


class SendBuffer:
    """Bytes of one stream, and whether the end comes after them. ``moved_at`` is the trio time of the last progress."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._moved = trio.Event()
        self.complete = False
        self.closed = False
        self.moved_at = trio.current_time()

    def __len__(self) -> int:
        return len(self._data)

    def push(self, data: bytes) -> None:
        """Add ``data``; wait in ``room`` afterwards."""
        if not self._data:
            self.moved_at = trio.current_time()
        self._data += data

    async def room(self) -> None:
        """Wait until a sender may go on: less than the high-water mark waits, or the stream is gone."""
        while len(self._data) >= HIGH_WATER_BYTES and not self.closed:
            await self._moved.wait()

    async def flushed(self) -> None:
        """Wait until the end of the stream has been sent, or the stream is gone."""
        while not self.closed:
            await self._moved.wait()

    def pop(self, limit: int) -> bytes:
        """Take at most ``limit`` bytes."""
        data = bytes(self._data[:limit])
        del self._data[:limit]
        if data:
            self.moved_at = trio.current_time()
            self._wake()
        return data

    def close(self) -> None:
        """Nothing more is sent on this stream: all was, or it was reset."""
        self.closed = True
        self._data.clear()
        self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = trio.Event()
