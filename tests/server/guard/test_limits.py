"""Time limits: each kind of waiting has one, and what makes progress is never cut."""

import pytest
import trio
from guard_client import PREFACE, H2Peer, Narrow, Peer, serving

pytestmark = pytest.mark.anyio

HALF_HEADERS = b"\0\0\0\x04\0\0\0\0\0" + b"\0\0\x01\x01\0\0\0\0\x01\x82"
SLOW = {
    "nothing": b"",
    "half a header": b"POST /read HTTP/1.1\r\nHost: x\r\nX-A: ",
    "half a preface": PREFACE[:12],
    "a preface": PREFACE,
    "half of HTTP/2 headers": PREFACE + HALF_HEADERS,
    "half a header behind a request": b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\nGET /ok HT",
}


@pytest.mark.parametrize("start", SLOW.values(), ids=SLOW)
async def test_headers_that_never_end(start: bytes) -> None:
    """Dribbling does not help: the limit is on the whole of the headers."""
    async with serving(header_timeout=0.5, keep_alive_timeout=0.5) as running:
        peer = await Peer.connect(running.port)
        await peer.send(start)
        with trio.move_on_after(5) as limit:
            while not await peer.closed(0.1):
                if start.endswith(b"X-A: "):
                    await peer.send(b"x")
        assert not limit.cancelled_caught
        if start.endswith(b"X-A: "):
            assert peer.status == 408 and b'"request_timeout"' in peer.data
        assert await running.unconnected()


@pytest.mark.parametrize("kind", [Peer, H2Peer])
async def test_idle_connections_end(kind) -> None:
    async with serving(keep_alive_timeout=0.3) as running:
        peer = await kind.connect(running.port)
        await (peer.request("/ok") if kind is H2Peer else peer.get("/ok"))
        assert await peer.closed(3) and b"ok" in peer.data


@pytest.mark.parametrize("kind", [Peer, H2Peer])
async def test_answers_and_uploads_in_progress_go_on(kind) -> None:
    """Neither a slow stream nor a slow upload is cut by the limits on headers and idling."""
    async with serving(header_timeout=0.5, keep_alive_timeout=0.5) as running:
        streaming, uploading = await kind.connect(running.port), await kind.connect(running.port)
        if kind is H2Peer:
            stream = await streaming.request("/stream?n=8&ms=100")
            upload = await uploading.request("/read", method="POST", end=False)
        else:
            await streaming.get("/stream?n=8&ms=100")
            await uploading.get("/read", "Content-Length: 8", method="POST")
        for n in range(8):
            if kind is H2Peer:
                uploading.h2.send_data(upload, b"x", end_stream=n == 7)
                await uploading.flush()
            else:
                await uploading.send(b"x")
            await trio.sleep(0.1)
        assert await uploading.until(b"8") and await streaming.until(b"[DONE]")
        if kind is H2Peer:
            assert await streaming.over(stream) and streaming.streams[stream].ended


async def test_client_that_does_not_read_is_dropped() -> None:
    """HTTP/1.1: the handler, stuck in its send and shielded for ever, comes free after the stall timeout."""
    async with serving(stall_timeout=0.4) as running:
        peer = await Peer.connect(running.port, receive_buffer=4096)
        await peer.get("/stuck?kib=65536")
        await trio.sleep(0.2)
        assert running.app.running == 1
        assert await running.quiet(3) and await running.unconnected(3)


async def test_stream_without_a_window_is_reset() -> None:
    """HTTP/2: the stream that stands still is reset, its siblings are not."""
    async with serving(stall_timeout=0.4, keep_alive_timeout=5) as running:
        peer = await Narrow.connect(running.port)
        stream = await peer.request("/stuck?kib=64")
        other = await peer.request("/prefill?ms=900")
        assert await peer.over(stream, seconds=3) and peer.streams[stream].reset is not None
        peer.h2.increment_flow_control_window(100, other)
        await peer.flush()
        assert await peer.over(other, seconds=3) and peer.streams[other].data == b"done"


async def test_window_that_opens_by_the_byte() -> None:
    """Slow progress is progress: a client that takes a byte at a time outlives the stall timeout."""
    async with serving(stall_timeout=1.5) as running:
        peer = await Narrow.connect(running.port)
        stream = await peer.request("/stuck?kib=4")
        for n in range(20):
            await trio.sleep(0.1)
            peer.h2.increment_flow_control_window(1, stream)
            await peer.flush()
            assert await peer.pump(lambda n=n: len(peer.streams[stream].data) == n + 1)
        assert not peer.streams[stream].over


async def test_slow_reader_is_not_dropped() -> None:
    async with serving(stall_timeout=1) as running:
        peer = await Peer.connect(running.port, receive_buffer=4096)
        await peer.get("/stuck?kib=6000")
        with trio.move_on_after(2.5):
            while not peer.gone:
                await peer._read()
                await trio.sleep(0.05)
        assert not peer.gone and running.app.running == 1


async def test_unread_uploads_are_held_back() -> None:
    """An app that does not read: its upload stops at the flow-control window, siblings on the connection do not."""
    async with serving() as running:
        peer = await H2Peer.connect(running.port)
        upload = await peer.request("/prefill?ms=600", method="POST", end=False)
        other = await peer.request("/read", method="POST", end=False)
        with trio.move_on_after(0.3):
            while True:
                room = min(peer.h2.local_flow_control_window(upload), 16384)
                if room:
                    peer.h2.send_data(upload, b"u" * room)
                    await peer.flush()
                await peer.pump(lambda: False, 0.02)
        peer.h2.send_data(other, b"x" * 1000, end_stream=True)
        await peer.flush()
        assert await peer.over(other) and peer.streams[other].data == b"1000"
        await peer.finish()
