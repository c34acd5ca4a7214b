"""What no client should send: the connection may end, nothing else does."""

import logging
import random

import pytest
from guard_client import PREFACE, H2Peer, Peer, ask, serving
from guard_faults import headers_frame
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from aserve.server.guard.http1 import GuardedHTTP1

pytestmark = pytest.mark.anyio

HELLO = PREFACE + SettingsFrame(0).serialize()
OK = [(b":method", b"GET"), (b":path", b"/ok"), (b":scheme", b"http"), (b":authority", b"x")]


def changed(*fields: tuple[bytes, bytes], drop: bytes = b"") -> bytes:
    return HELLO + headers_frame(1, *(f for f in OK if f[0] != drop), *fields)


def frame(kind, stream_id: int, **values) -> bytes:
    flags = values.pop("flags", ())
    made = kind(stream_id, **values)
    made.flags |= set(flags)
    return made.serialize()


MALFORMED = {
    "nothing but zeros": bytes(4096),
    "random bytes": random.Random(1).randbytes(5000),
    "a TLS hello": bytes.fromhex("1603010200010001fc0303") + random.Random(2).randbytes(500),
    "no target": b"GET\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "bad version": b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    "latin target": b"GET /caf\xe9 HTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"GET /ok HTTP/1.1\r\n\r\n",
    "two lengths": b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "negative length": b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: -3\r\n\r\nabc",
    "length and chunks": b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"zzz\r\n",
    "bad chunk": b"POST /read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab",
    "huge chunk size": b"POST /read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    "huge header": b"GET /ok HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200000,
    "header with a null": b"GET /ok HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n",
    "folded header": b"GET /ok HTTP/1.1\r\nHost: x\r\nX: a\r\n  b\r\n\r\n",
    "h2c upgrade": b"GET /ok HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: !!!\r\n\r\n",
    "websocket over garbage": b"GET /ok HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    b"\x81\xff",
    "pipelined garbage": b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n" * 3 + b"\0\0\0",
    "pipelined preface": b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n" + PREFACE,
    "preface twice": PREFACE * 2,
    "preface, then garbage": PREFACE + random.Random(3).randbytes(300),
    "oversized frame": HELLO + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(20000),
    "data on an idle stream": HELLO + frame(DataFrame, 1, data=b"x"),
    "data on stream 0": HELLO + b"\0\0\1\0\0\0\0\0\0x",
    "bad padding": HELLO + b"\0\0\2\0\x08\0\0\0\1\xff\xff",
    "reset of an idle stream": HELLO + frame(RstStreamFrame, 1),
    "window of nothing": HELLO + b"\0\0\4\x08\0\0\0\0\0\0\0\0\0",
    "window overflow": HELLO + frame(WindowUpdateFrame, 0, window_increment=2**31 - 1) * 2,
    "even stream": HELLO + headers_frame(2, *OK),
    "stream ids backwards": HELLO + headers_frame(5, *OK) + headers_frame(3, *OK),
    "naked continuation": HELLO + frame(ContinuationFrame, 1, data=b"\x82", flags={"END_HEADERS"}),
    "endless continuation": HELLO
    + frame(HeadersFrame, 1, data=b"\x82")
    + frame(ContinuationFrame, 1, data=bytes(100)) * 500,
    "bad compression": HELLO + frame(HeadersFrame, 1, data=b"\xff\xff\xff\xff\xff", flags={"END_HEADERS"}),
    "push from the client": HELLO + frame(PushPromiseFrame, 1, promised_stream_id=2, data=b"\x82"),
    "priority on itself": HELLO + frame(PriorityFrame, 1, depends_on=1),
    "bad settings": HELLO + b"\0\0\5\4\0\0\0\0\0abcde",
    "settings out of range": HELLO + frame(SettingsFrame, 0, settings={4: 2**31}),
    "ping of a wrong size": HELLO + b"\0\0\1\6\0\0\0\0\0x",
    "flood of pings": HELLO + frame(PingFrame, 0, opaque_data=b"12345678") * 5000,
    "flood of settings": HELLO + frame(SettingsFrame, 0, settings={3: 100}) * 2000,
    "no method": changed(drop=b":method"),
    "no path": changed(drop=b":path"),
    "empty path": changed((b":path", b""), drop=b":path"),
    "relative path": changed((b":path", b"ok"), drop=b":path"),
    "latin path": changed((b":path", b"/\xe9"), drop=b":path"),
    "latin method": changed((b":method", b"\xe9"), drop=b":method"),
    "method with a space": changed((b":method", b"GET /"), drop=b":method"),
    "path twice": changed((b":path", b"/")),
    "unknown pseudo-header": changed((b":evil", b"x")),
    "pseudo-header at the end": changed((b"a", b"b"), (b":protocol", b"websocket")),
    "connection header": changed((b"connection", b"close")),
    "capital header": changed((b"X-Up", b"a")),
    "latin header": changed((b"x", b"\xe9\xff")),
    "lying content-length": HELLO
    + headers_frame(1, *OK, (b"content-length", b"9"), end=False)
    + frame(DataFrame, 1, data=b"x" * 20, flags={"END_STREAM"}),
    "CONNECT": HELLO + headers_frame(1, (b":method", b"CONNECT"), (b":authority", b"x:1")),
    "extended CONNECT": changed((b":method", b"CONNECT"), (b":protocol", b"websocket"), drop=b":method"),
    "data after the end": HELLO + headers_frame(1, *OK) + frame(DataFrame, 1, data=b"x"),
    "trailers in a loop": HELLO
    + headers_frame(1, (b":method", b"POST"), *OK[1:], end=False)
    + headers_frame(1, (b"a", b"b")) * 3,
}


async def test_malformed_input_hurts_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """A stream on another connection runs through all of it, in step with its server."""
    async with serving() as running:
        bystander = await H2Peer.connect(running.port)
        stream = await bystander.request("/stream?n=100000&ms=1")
        for name, data in MALFORMED.items():
            before = len(bystander.streams[stream].data)
            evil = await Peer.connect(running.port)
            await evil.send(data)
            await evil.pump(lambda: False, 0.03)
            await evil.finish()
            assert await bystander.pump(lambda n=before: len(bystander.streams[stream].data) > n), name
            assert await ask(running.port) == b"ok", name
        await bystander.cancel(stream)
        await bystander.finish()
        assert await running.unconnected()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("no version", 400),
        ("huge header", 431),
        ("two lengths", 400),
        ("bad chunk", 400),
        ("latin target", 400),
        ("h2c upgrade", 200),
        ("websocket over garbage", 200),
    ],
)
async def test_answer_to_malformed_http1(name: str, status: int) -> None:
    """Malformed HTTP/1.1 gets a status and an error object; upgrades are ignored."""
    async with serving() as running:
        peer = await Peer.connect(running.port)
        await peer.send(MALFORMED[name])
        assert await peer.until(b"}}" if status != 200 else b"ok")
        assert peer.status == status
        if status != 200:
            assert b'"code": ' in peer.data and await peer.closed()


@pytest.mark.parametrize("at_once", [True, False])
async def test_http2_begins_a_connection_or_not_at_all(at_once: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Behind a request, in the same packet or later, its preface is a malformed request; the app notices nothing."""
    async with serving() as running:
        peer = await Peer.connect(running.port)
        await peer.send(b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n" + (PREFACE if at_once else b""))
        assert await peer.until(b"\r\n\r\nok")
        if not at_once:
            await peer.send(PREFACE)
        assert await peer.until(b"}}") and await peer.closed()
        assert bytes(peer.data).count(b"HTTP/1.1 ") == 2 and b"HTTP/1.1 400 " in peer.data
        assert await running.quiet()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_fault_while_the_next_request_is_taken_stays_out_of_the_app(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pipelined requests are parsed in the last send of the one before, which must not fail for them."""

    async def fail(self: object, request: object) -> None:
        if self.keep_alive_requests:  # type: ignore[attr-defined]
            raise RuntimeError("a fault of ours")
        await create(self, request)  # type: ignore[arg-type]

    create = GuardedHTTP1._create_stream
    monkeypatch.setattr(GuardedHTTP1, "_create_stream", fail)
    async with serving() as running:
        peer = await Peer.connect(running.port)
        await peer.send(b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        assert await peer.until(b"\r\n\r\nok") and await peer.closed()
        assert await running.quiet()
    assert [r.levelno for r in caplog.records if r.levelno >= logging.WARNING] == [logging.WARNING]


async def test_malformed_request_ends_its_stream_only() -> None:
    """On HTTP/2 a request that no app could be given is answered, and its siblings go on."""
    async with serving() as running:
        peer = await H2Peer.connect(running.port)
        sibling = await peer.request("/raw?n=20&ms=5")
        odd = peer.begin("relative")
        await peer.flush()
        assert await peer.over(odd, sibling)
        assert peer.streams[odd].status == 400 and b'"malformed_request"' in peer.streams[odd].data
        assert peer.streams[sibling].ended
