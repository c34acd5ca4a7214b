"""What a connection does when all goes well, and how it ends."""

import logging

import h2.exceptions
import pytest
import trio
from guard_app import App
from guard_client import H2Peer, Narrow, Peer, ask, serving

from aserve.server.guard.stream import GuardedStream

pytestmark = pytest.mark.anyio


async def test_keep_alive_and_pipelining() -> None:
    async with serving() as running:
        peer = await Peer.connect(running.port)
        for n in range(3):
            await peer.get("/ok")
            assert await peer.pump(lambda n=n: peer.data.count(b"ok") == n + 1)
        await peer.send(b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        assert await peer.pump(lambda: peer.data.count(b"HTTP/1.1 200") == 53)


async def test_pipelined_requests_are_read_with_bounds() -> None:
    """Megabytes behind a running request stay with the client."""
    async with serving() as running:
        peer = await Peer.connect(running.port)
        await peer.get("/prefill?ms=700")
        sent = 0
        with trio.move_on_after(0.4):
            while True:
                await peer.stream.send_all(b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
                sent += 31000
        assert sent < 8_000_000
        assert await peer.until(b"done")


async def test_half_close_still_gets_its_answer() -> None:
    """A client that shuts its sending side (``nc``) is told to the app as a disconnect; what the app says arrives."""
    async with serving() as running:
        peer = await Peer.connect(running.port)
        await peer.get("/raw?n=5&ms=10")
        await peer.stream.send_eof()
        assert await peer.until(b"0\r\n\r\n") and await peer.closed()


async def test_failure_before_the_answer_is_a_500() -> None:
    async with serving() as running:
        peer = await Peer.connect(running.port)
        await peer.get("/fail")
        assert await peer.until(b'"internal_error"') and peer.status == 500
        other = await H2Peer.connect(running.port)
        stream = await other.request("/fail")
        assert await other.over(stream) and other.streams[stream].status == 500 and other.streams[stream].ended


@pytest.mark.parametrize("path", ["/fail-late", "/unfinished"])
async def test_failure_within_an_answer_closes_http1(path: str) -> None:
    async with serving() as running:
        peer = await Peer.connect(running.port)
        await peer.get(path)
        assert await peer.closed() and not peer.data.endswith(b"0\r\n\r\n")


async def test_polling_receive_sees_the_disconnect() -> None:
    """Starlette's ``is_disconnected`` asks in an already cancelled scope."""
    seen = trio.Event()

    async def app(scope, receive, send) -> None:
        while True:
            with trio.CancelScope() as now:
                now.cancel()
                if (await receive())["type"] == "http.disconnect":
                    break
            await trio.sleep(0.01)
        seen.set()

    async with serving(app) as running:
        peer = await Peer.connect(running.port)
        await peer.get("/")
        await trio.sleep(0.05)
        await peer.finish()
        with trio.fail_after(2):
            await seen.wait()


@pytest.mark.parametrize("kind", [Peer, H2Peer])
async def test_fault_of_ours_ends_one_connection(kind, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """What nobody foresaw is one line in the log; the other connections do not notice."""
    async with serving() as running:
        bystander = await H2Peer.connect(running.port)
        stream = await bystander.request("/raw?n=30&ms=10")
        await bystander.pump(lambda: bool(bystander.streams[stream].data))
        with monkeypatch.context() as patch:

            async def fail(self, *_: object) -> None:
                raise ZeroDivisionError

            patch.setattr(GuardedStream, "handle", fail)
            victim = await kind.connect(running.port)
            await (victim.request("/ok") if kind is H2Peer else victim.get("/ok"))
            assert await victim.closed()
        assert await bystander.over(stream) and bystander.streams[stream].ended
    (record,) = [r for r in caplog.records if r.levelno >= logging.INFO]
    assert record.levelno == logging.WARNING and "ZeroDivisionError" in record.getMessage()


async def test_absolute_target() -> None:
    """``GET http://host/path``, which RFC 9112 3.2.2 has every server accept."""
    async with serving() as running:
        peer = await Peer.connect(running.port)
        await peer.get("http://x.example/read?a=1")
        assert await peer.until(b"0") and running.app.seen == ["/read"]


@pytest.mark.parametrize("grace", [0.0, 5.0])
async def test_stop(grace: float) -> None:
    """Idle connections end at once, running requests have the grace time, new connections are not taken."""
    async with serving() as running:
        idle, busy, both = [await kind.connect(running.port) for kind in (Peer, Peer, H2Peer)]
        await busy.get("/raw?n=20&ms=10")
        stream = await both.request("/raw?n=20&ms=10")
        await both.pump(lambda: bool(both.streams[stream].data))
        running.server.stop(grace)
        assert await idle.closed()
        assert await busy.closed() and await both.closed()
        assert busy.data.endswith(b"0\r\n\r\n") == both.streams[stream].ended == bool(grace)
        with trio.fail_after(2):
            await running.ended.wait()
        assert await ask(running.port) is None


async def test_stop_refuses_new_streams() -> None:
    """A stream begun on a connection that drains is refused, so that the client may try elsewhere."""
    async with serving() as running:
        peer = await H2Peer.connect(running.port)
        old = await peer.request("/raw?n=30&ms=10")
        await peer.pump(lambda: bool(peer.streams[old].data))
        running.server.stop(5)
        await trio.sleep(0.05)
        new = await peer.request("/ok")
        assert await peer.over(old, new) and peer.streams[old].ended and peer.streams[new].reset == 7
        assert await peer.closed() and peer.goaway


@pytest.mark.parametrize("kind", [Peer, Narrow])
async def test_stop_with_a_client_that_does_not_read(kind) -> None:
    """No client can hold up the end of the server beyond the grace time."""
    async with serving() as running:
        peer = await kind.connect(running.port, receive_buffer=4096)
        await (peer.request("/stream?n=100000&ms=0") if kind is Narrow else peer.get("/stream?n=100000&ms=0"))
        await trio.sleep(0.3)
        running.server.stop(0.3)
        with trio.fail_after(4):  # the app's own shield adds a second
            await running.ended.wait()
        assert running.app.running == 0


async def test_apps_are_bounded_when_resets_are_slow_to_be_noticed() -> None:
    """A reset stream's app counts until it has ended."""
    app = App()
    async with serving(app, h2_max_concurrent_streams=8, keep_alive_timeout=5) as running:
        peer = await H2Peer.connect(running.port)
        for _ in range(100):
            await peer.cancel(await peer.request("/raw?n=50&ms=10"))
            await peer.pump(lambda: False, 0.002)
        assert app.running <= 8
        await peer.finish()


async def test_late_body_of_an_early_answer_is_bounded() -> None:
    """What comes after the answer is thrown away for a while, then the stream is reset without an error."""
    async with serving(keep_alive_timeout=5) as running:
        peer = await H2Peer.connect(running.port)
        stream = await peer.request("/early", method="POST", end=False)
        sent = 0
        with trio.move_on_after(5):
            while peer.streams[stream].reset is None:
                try:
                    room = min(peer.h2.local_flow_control_window(stream), 16384)
                    if room:
                        peer.h2.send_data(stream, b"x" * room)
                        sent += room
                except h2.exceptions.ProtocolError:
                    break
                await peer.flush()
                await peer.pump(lambda: False, 0.001)
        assert peer.streams[stream].status == 413 and peer.streams[stream].ended
        assert peer.streams[stream].reset == 0 and 2**20 <= sent < 2**21
