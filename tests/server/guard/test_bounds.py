"""What one client may use of the server: headers, frames, buffers, connections; and what it gets beyond that."""

import errno
import logging
import tracemalloc
from contextlib import suppress

import pytest
import trio
import trio.lowlevel
from guard_client import HELLO, H2Peer, Peer, RawH2Peer, ask, serving
from guard_faults import headers_frame
from h2.errors import ErrorCodes
from h2.exceptions import DenialOfServiceError
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from aserve.server.guard.inbox import Inbox
from aserve.server.guard.lenient_h2 import Calm

pytestmark = pytest.mark.anyio

OK = [(b":method", b"GET"), (b":path", b"/ok"), (b":scheme", b"http"), (b":authority", b"x")]
READ = [(b":method", b"POST"), (b":path", b"/read"), *OK[2:]]
BOMB = b"x" * 4000


async def test_too_many_headers() -> None:
    async with serving(keep_alive_timeout=9) as running:
        peer = await Peer.connect(running.port)
        await peer.get("/ok", *[f"X-{n}: a" for n in range(127)])
        assert await peer.until(b"ok") and peer.status == 200
        await peer.get("/ok", *[f"X-{n}: a" for n in range(128)])
        assert await peer.until(b'"headers_too_large"') and b"HTTP/1.1 431 " in peer.data and await peer.closed()
        other = await H2Peer.connect(running.port)
        good = other.begin("/ok", headers=[(f"x-{n}", "a") for n in range(124)])
        bad = other.begin("/ok", headers=[(f"x-{n}", "a") for n in range(125)])
        await other.flush()
        assert await other.over(good, bad)
        assert other.streams[good].status == 200 and other.streams[bad].status == 431


async def test_too_large_headers() -> None:
    """32 KiB on both protocols; HTTP/2 gives its connection up, since the block was never read as a whole."""
    async with serving(keep_alive_timeout=9) as running:
        peer = await Peer.connect(running.port)
        await peer.get("/ok", "X: " + "a" * 31000)
        assert await peer.until(b"ok") and peer.status == 200
        await peer.get("/ok", "X: " + "a" * 40000)
        assert await peer.until(b'"headers_too_large"') and await peer.closed()
        other = await H2Peer.connect(running.port)
        stream = other.begin("/ok", headers=[("x", "a" * 31000)])
        await other.flush()
        assert await other.over(stream) and other.streams[stream].status == 200
        other.begin("/ok", headers=[("x", "a" * 40000)])
        await other.flush()
        assert await other.closed() and other.goaway_code == ErrorCodes.ENHANCE_YOUR_CALM


def raw(stream_id: int, block: bytes, *, end: bool = True) -> bytes:
    frame = HeadersFrame(stream_id, data=block)
    frame.flags |= {"END_STREAM", "END_HEADERS"} if end else {"END_STREAM"}
    return frame.serialize()


async def grown_by(data: list[bytes]) -> tuple[bool, int | None]:
    """Whether the server has less than 1 MiB in use for a client that sends this, and the code that it ends it with."""
    async with serving(keep_alive_timeout=9) as running:
        evil = await RawH2Peer.connect(running.port)
        await evil.send(HELLO)
        await evil.pump(lambda: False, 0.05)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for part in data:
            await evil.send(part)
            if evil.gone:
                break
            await evil.pump(lambda: False, 0.001)
        await evil.pump(lambda: evil.goaway_code is not None)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        assert await ask(running.port) == b"ok"
        return peak < 2**20, evil.goaway_code


async def test_compression_bomb() -> None:
    """One entry of 4,000 bytes in the table, and then references to it, a byte for each: 64 MB from 16 KB."""
    encoder = Encoder()
    never = [(name, value, True) for name, value in OK]  # not put into the table, where there is room for one
    first = encoder.encode([*never, (b"x", BOMB)], huffman=False)
    again = encoder.encode([*never, (b"x", BOMB)], huffman=False)
    block = again + again[-1:] * 16000
    assert len(block) < 2**14
    blocks = [raw(1, first), *[raw(n, block) for n in range(3, 21, 2)]]
    assert await grown_by(blocks) == (True, ErrorCodes.ENHANCE_YOUR_CALM)


async def test_flood_of_continuations() -> None:
    """A block of headers that never ends is refused at 64 KiB, whatever the size of its frames."""
    start = raw(1, b"\x82", end=False)
    large = [start, *[ContinuationFrame(1, data=bytes(16384)).serialize()] * 60]
    assert await grown_by(large) == (True, ErrorCodes.ENHANCE_YOUR_CALM)
    small = [start, *[ContinuationFrame(1, data=b"").serialize() * 1000] * 20]
    assert await grown_by(small) == (True, ErrorCodes.PROTOCOL_ERROR)


async def test_overlong_frame_is_refused_by_its_head() -> None:
    """16 MB are announced; nothing of them is taken."""
    async with serving(keep_alive_timeout=9) as running:
        peer = await H2Peer.connect(running.port)
        await peer.send(b"\xff\xff\xff\x00\x00\x00\x00\x00\x01")
        assert await peer.closed() and peer.goaway_code == ErrorCodes.FRAME_SIZE_ERROR
    announced = b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(100_000)
    assert await grown_by([announced, *[bytes(100_000)] * 100]) == (True, ErrorCodes.FRAME_SIZE_ERROR)


async def test_body_in_single_bytes_is_one_message() -> None:
    """An app that does not read costs its flow-control window, not a message for each byte of it."""
    inbox = Inbox(lambda _: None)
    tracemalloc.start()
    for _ in range(60_000):
        await inbox.put({"type": "http.request", "body": b"x", "more_body": True})
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 300_000
    await inbox.put({"type": "http.request", "body": b"", "more_body": False})
    assert await inbox.receive() == {"type": "http.request", "body": b"x" * 60_000, "more_body": False}
    assert inbox.size == 0


FLOODS = {
    "pings": PingFrame(0, opaque_data=b"12345678").serialize(),
    "settings": SettingsFrame(0, settings={3: 100}).serialize(),
    "window updates": WindowUpdateFrame(0, window_increment=1).serialize(),
    "priorities": b"\0\0\5\2\0\0\0\0\1" + bytes(5),
    "resets": RstStreamFrame(1).serialize(),
    "empty data": DataFrame(1, data=b"").serialize(),
    "unknown frames": b"\0\0\0\xee\0\0\0\0\0",
}


@pytest.mark.parametrize("name", FLOODS)
async def test_flood_of_frames_that_carry_nothing(name: str) -> None:
    """Beyond 1,000 at once the connection is told to calm down, and ended."""
    async with serving(keep_alive_timeout=9) as running:
        peer = await RawH2Peer.connect(running.port)
        await peer.send(HELLO + headers_frame(1, *READ, end=False))
        await peer.send(FLOODS[name] * 900)
        await peer.pump(lambda: False, 0.2)
        assert not peer.gone
        await peer.send(FLOODS[name] * 900)
        assert await peer.closed() and peer.goaway_code == ErrorCodes.ENHANCE_YOUR_CALM


async def test_rapid_reset_is_ended() -> None:
    """CVE-2023-44487: few of 10,000 streams reach an app, none of those stays, the connection is ended."""
    async with serving(keep_alive_timeout=9) as running:
        peer = await H2Peer.connect(running.port)
        for _ in range(100):
            for _ in range(100):
                peer.h2.reset_stream(peer.begin("/stream?n=1000"), 8)
            await peer.send(peer.h2.data_to_send())
            await peer.pump(lambda: False, 0.001)
            if peer.goaway:
                break
        await peer.closed()
        assert peer.goaway_code == ErrorCodes.ENHANCE_YOUR_CALM
        assert len(running.app.seen) <= 250 and peer.goaway_last < 2 * 800
        assert await running.quiet(20) and await running.unconnected(20)


async def test_busy_clients_are_never_too_lively() -> None:
    """Thousands of window updates and pings are fine from a client that is being sent data."""
    async with serving(keep_alive_timeout=9) as running:
        peer = await H2Peer.connect(running.port)
        streams = [peer.begin("/raw?n=150&ms=0") for _ in range(16)]
        await peer.flush()
        sent = 0
        while not all(peer.streams[s].over for s in streams):
            before = sum(len(peer.streams[s].data) for s in streams)
            await peer.pump(lambda n=before: sum(len(peer.streams[s].data) for s in streams) > n, 1)
            peer.h2.ping(b"12345678")
            peer.h2.increment_flow_control_window(1)
            sent += 2
            await peer.flush()
            assert not peer.gone
        assert all(peer.streams[s].ended for s in streams)


def test_calm_comes_back_with_time() -> None:
    now = 0.0
    calm = Calm(lambda: now)
    for _ in range(1000):
        calm.spend()
    with pytest.raises(DenialOfServiceError, match="carry nothing"):
        calm.spend()
    now = 1.0
    for _ in range(98):
        calm.spend()
    left = 0
    with suppress(DenialOfServiceError):
        for _ in range(5):
            calm.spend()
            left += 1
    assert left < 5


def test_calm_is_low_for_a_time() -> None:
    """A client that was noisy once, and then only idle, is not held up for the rest of its connection."""
    now = 0.0
    calm = Calm(lambda: now)
    calm.spends(500)
    assert calm.is_low
    now = 3.0
    assert calm.is_low
    now = 4.5
    assert not calm.is_low
    calm.earn(2000)
    now = 1000.0
    assert calm.spends(2900)  # what was earned stays


async def test_a_malformed_request_costs_its_stream_only() -> None:
    """RFC 9113, 8.1.1: a proxy's connection must not die of what one of its clients sent."""
    odd = {
        "capital": [*OK, (b"X-Up", b"a")],
        "connection": [*OK, (b"connection", b"close")],
        "te": [*OK, (b"te", b"gzip")],
        "no path": [f for f in OK if f[0] != b":path"],
        "path twice": [*OK, (b":path", b"/")],
        "unknown pseudo-header": [*OK, (b":evil", b"x")],
        "late pseudo-header": [(b"a", b"b"), *OK],
        "two lengths": [*OK, (b"content-length", b"1"), (b"content-length", b"2")],
    }
    async with serving(keep_alive_timeout=9) as running:
        peer = await H2Peer.connect(running.port)
        sibling = await peer.request("/raw?n=100000&ms=1")
        for name, fields in odd.items():
            stream = peer.begin("/ok")
            peer.h2.data_to_send()  # not this, but
            await peer.send(headers_frame(stream, *fields))
            assert await peer.over(stream), name
            assert peer.streams[stream].reset == ErrorCodes.PROTOCOL_ERROR, name
        stream = peer.begin("/read", method="POST", end=False, headers=[("content-length", "5")])
        await peer.flush()
        data = DataFrame(stream, data=b"x" * 9)
        data.flags.add("END_STREAM")
        await peer.send(data.serialize())
        assert await peer.over(stream) and peer.streams[stream].reset == ErrorCodes.PROTOCOL_ERROR
        assert await running.app_sees(lambda app: app.running == 1)
        before = len(peer.streams[sibling].data)
        assert await peer.pump(lambda: len(peer.streams[sibling].data) > before)
        await peer.cancel(sibling)


@pytest.mark.parametrize("kind", [Peer, H2Peer])
async def test_expectation(kind) -> None:
    """100 goes out when the app wants the body, so that a refusal can be the only answer."""
    expect = ("expect", "100-continue")
    async with serving(keep_alive_timeout=9) as running:
        peer, refused = await kind.connect(running.port), await kind.connect(running.port)
        if kind is Peer:
            await peer.get("/read", "Content-Length: 5", ": ".join(expect), method="POST")
            assert await peer.until(b"100 \r\n\r\n")
            await peer.send(b"12345")
            assert await peer.until(b"\r\n\r\n5")
            await refused.get("/early", "Content-Length: 5", ": ".join(expect), method="POST")
            assert await refused.until(b"too large") and refused.status == 413
            assert b"100" not in refused.data and await refused.closed()
            return
        stream = peer.begin("/read", method="POST", end=False, headers=[expect])
        await peer.flush()
        assert await peer.pump(lambda: peer.streams[stream].continued)
        peer.h2.send_data(stream, b"12345", end_stream=True)
        await peer.flush()
        assert await peer.over(stream) and peer.streams[stream].data == b"5"
        stream = refused.begin("/early", method="POST", end=False, headers=[expect])
        await refused.flush()
        assert await refused.over(stream) and refused.streams[stream].status == 413
        assert not refused.streams[stream].continued


async def test_a_body_in_tiny_chunks_is_gathered_and_gives_way() -> None:
    """Its framing is all that there is to work on: it reaches the app in large pieces, and waits after each of them."""
    async with serving() as running:
        peer = await Peer.connect(running.port)
        await peer.get("/parts", "Transfer-Encoding: chunked", method="POST")
        await peer.send(b"1\r\na\r\n" * 2000 + b"0\r\n\r\n")
        assert await peer.until(b"\r\n\r\n")
        assert await peer.pump(lambda: peer.data.rpartition(b"\r\n\r\n")[2] != b"")
        assert int(peer.data.rpartition(b"\r\n\r\n")[2]) <= 20
        await peer.get("/read", "Transfer-Encoding: chunked", method="POST")
        await peer.send(b"1\r\na\r\n" * 2000 + b"0\r\n\r\n")
        assert await peer.until(b"\r\n\r\n2000")


async def test_connections_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """The longest idle one makes room; where all are busy, new ones wait until one is not."""
    async with serving(max_connections=4, keep_alive_timeout=30, header_timeout=30) as running:
        silent, idle, slow, busy = [await Peer.connect(running.port) for _ in range(4)]
        await idle.get("/ok")
        assert await idle.until(b"ok")
        await busy.get("/prefill?ms=30000")
        await slow.get("/raw?n=60&ms=10")
        assert await slow.until(b"data")
        assert running.server.num_connections == 4 and not silent.gone
        third = await Peer.connect(running.port)
        await third.get("/prefill?ms=30000")
        assert await silent.closed(20) and not idle.gone
        fourth = await Peer.connect(running.port)
        await fourth.get("/prefill?ms=30000")
        assert await idle.closed(20)
        assert await running.app_sees(lambda app: app.running == 4)
        assert running.server.num_connections == 4
        waiting = await Peer.connect(running.port)  # the system's queue takes it
        await waiting.get("/ok")
        assert not await waiting.until(b"ok", 0.3) and running.server.num_connections == 4
        assert await slow.until(b"0\r\n\r\n")  # that one is done, and idle
        assert await waiting.until(b"ok") and await slow.closed(20)
        assert [r.levelno for r in caplog.records if r.levelno >= logging.WARNING] == [logging.WARNING]
        await trio.lowlevel.checkpoint()


async def test_lingering_connections_make_room_first() -> None:
    """Those that were refused and go on sending hold a place only as long as nobody needs it."""
    async with serving(max_connections=4, linger_timeout=30) as running:
        for _ in range(12):
            peer = await RawH2Peer.connect(running.port)
            await peer.send(HELLO + bytes(1000))
            assert await peer.pump(lambda p=peer: p.goaway_code is not None)
        assert running.server.num_connections <= 4
        assert await ask(running.port) == b"ok"


async def test_one_greedy_client_leaves_room_for_others() -> None:
    """Connections that say nothing are the first to go: nobody is kept out by them."""
    async with serving(max_connections=8, keep_alive_timeout=30, header_timeout=30) as running:
        for _ in range(40):
            await Peer.connect(running.port)
        assert await ask(running.port) == b"ok"
        assert running.server.num_connections <= 8


async def test_no_file_descriptors_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """accept() fails for want of descriptors: one line, open connections go on, and new ones are taken later."""
    accept, failures = trio.SocketListener.accept, 5

    async def failing(self: trio.SocketListener) -> trio.SocketStream:
        nonlocal failures
        await trio.lowlevel.wait_readable(self.socket)
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(self)

    async with serving(keep_alive_timeout=9) as running:
        old = await Peer.connect(running.port)
        await old.get("/ok")
        assert await old.until(b"ok")
        monkeypatch.setattr(trio.SocketListener, "accept", failing)
        assert await ask(running.port) == b"ok"  # the accept that had begun already
        waiting = await Peer.connect(running.port)
        await waiting.get("/ok")
        await old.get("/ok")
        assert await old.pump(lambda: old.data.count(b"\r\n\r\nok") == 2)
        assert await waiting.until(b"ok") and failures == 0
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert line.startswith("no new connections for now: Too many open files")
