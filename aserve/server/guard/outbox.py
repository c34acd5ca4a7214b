"""The bytes on their way to one peer: one writer per connection, a fast path, and a limit on standing still.

``write`` never waits and never fails, so no cancellation and no dead socket can surface in the middle of a protocol's
work; callers wait for room afterwards, in ``drain``, where being cancelled loses nothing. Hypercorn writes from the
task of whoever has something to say, under a shield without a deadline. Used by ``connection`` only.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import trio

_PIECE_BYTES = 2**16
_WRITES_PER_CHECKPOINT = 32

PlainStream = trio.SocketStream
TlsStream = trio.SSLStream[trio.SocketStream]


class Outbox:
    """Ordered bytes for one peer.

    Args:
        stream: Where to write; nobody else may write to it.
        stall_timeout: Seconds without a byte taken after which the peer counts as gone.
        on_broken: Called once, from whatever task notices, when nothing can be written any more.
    """

    def __init__(self, stream: PlainStream | TlsStream, stall_timeout: float, on_broken: Callable[[], None]) -> None:
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._stall_timeout = stall_timeout
        self._on_broken = on_broken
        self._pending = bytearray()
        self._wake = trio.Event()
        self._drained = trio.Event()
        self._writes = 0
        self.broken = False

    def write(self, data: bytes) -> None:
        """Take over ``data``; what the kernel accepts at once is written at once (one syscall, no task switch)."""
        if self.broken or not data:
            return
        written = 0
        if self._socket is not None and not self._pending:
            try:
                written = os.write(self._socket.fileno(), data)
            except BlockingIOError:
                pass
            except OSError:
                self.fail()
                return
        if written < len(data):
            self._pending += data[written:]
            self._wake.set()

    async def drain(self, allowed: int = 0) -> None:
        """Wait until everything written is with the kernel, or the peer is gone. Yields at times in any case.

        Does not wait while at most ``allowed`` bytes are left.
        """
        if len(self._pending) > allowed:
            await self._drained.wait()
        else:
            self._writes += 1
            if self._writes % _WRITES_PER_CHECKPOINT == 0:  # a handler that never waits must not starve the others
                await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Write what the fast path could not; runs as long as the connection does."""
        try:
            while not self.broken:
                await self._wake.wait()
                self._wake = trio.Event()
                while self._pending:
                    await self._write_piece()
                self._drained.set()
                self._drained = trio.Event()
        finally:
            self.fail()  # whoever waits here, even in a shield, must not outlive the writer

    async def _write_piece(self) -> None:
        with trio.move_on_after(self._stall_timeout) as limit:
            try:
                sent = await self._send(bytes(self._pending[:_PIECE_BYTES]))
                del self._pending[:sent]
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                self.fail()
        if limit.cancelled_caught:
            self.fail()

    async def _send(self, piece: bytes) -> int:
        if self._socket is not None:
            return await self._socket.send(piece)
        piece = piece[: 2**14]  # one TLS record, so that a slow peer's progress shows
        await self._stream.send_all(piece)
        return len(piece)

    def fail(self) -> None:
        """The peer is gone: drop everything, release everybody who waits."""
        if self.broken:
            return
        self.broken = True
        self._pending.clear()
        self._wake.set()
        self._drained.set()
        self._on_broken()
