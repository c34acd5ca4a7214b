"""HTTP/2 frame by frame, as RFC 9113 (sections in the rows) has it: what ends a connection, what ends a stream only,
what is ignored. Whatever it is, a client on another connection is served."""

from dataclasses import dataclass

import pytest
from guard_client import GOAWAY, HEADERS, HELLO, PING, RST_STREAM, RawH2Peer, ask, serving
from hpack import Encoder

pytestmark = pytest.mark.anyio

NO_ERROR, PROTOCOL, INTERNAL, FLOW_CONTROL, SETTINGS_TIMEOUT, CLOSED, SIZE = range(7)
REFUSED, CANCEL, COMPRESSION, CONNECT, CALM = 7, 8, 9, 10, 11
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 32
OK = [(b":method", b"GET"), (b":path", b"/ok"), (b":scheme", b"http"), (b":authority", b"x")]
READ = [(b":method", b"POST"), (b":path", b"/read"), *OK[2:]]
SLOW = [(b":method", b"GET"), (b":path", b"/prefill?ms=300"), *OK[2:]]
MOST = 2**31 - 1


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"", *, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def block(fields: list[tuple[bytes, bytes]]) -> bytes:
    return Encoder().encode(fields, huffman=False)


def headers(stream_id: int, fields: list[tuple[bytes, bytes]], *, end: bool = True, whole: bool = True) -> bytes:
    flags = (END_STREAM if end else 0) | (END_HEADERS if whole else 0)
    return frame(1, flags, stream_id, block(fields))


def data(stream_id: int, body: bytes = b"x", *, end: bool = False) -> bytes:
    return frame(0, END_STREAM if end else 0, stream_id, body)


def setting(number: int, value: int) -> bytes:
    return frame(4, 0, 0, number.to_bytes(2, "big") + value.to_bytes(4, "big"))


def window(stream_id: int, increment: int) -> bytes:
    return frame(8, 0, stream_id, increment.to_bytes(4, "big"))


@dataclass(frozen=True)
class Gone:
    """GOAWAY with one of these codes, and the end of the connection."""

    codes: tuple[int, ...]


@dataclass(frozen=True)
class Reset:
    """RST_STREAM with this code for stream 1; the connection goes on."""

    code: int


@dataclass(frozen=True)
class Served:
    """Stream 1 is answered with this status; the connection goes on."""

    status: bytes


IGNORED = "ignored"


def gone(*codes: int) -> Gone:
    return Gone(codes)


OPEN, UNREAD = headers(1, READ, end=False), headers(1, [READ[0], (b":path", b"/raw?n=30&ms=10"), *OK[2:]], end=False)
ROWS: dict[str, tuple[bytes, object]] = {
    # 3.4, 4.1, 4.2: frames
    "unknown frame type": (frame(0xEE, 0xFF, 0, b"whatever"), IGNORED),
    "unknown frame on a stream": (frame(0xEE, 0, 1, b"whatever"), IGNORED),
    "unknown flags": (frame(6, 0xFE, 0, b"12345678"), IGNORED),
    "reserved bit of a stream id": (frame(8, 0, 2**31, b"\0\0\0\1"), IGNORED),
    # hyperframe takes the bit for a part of the number
    "reserved bit of an increment": (frame(8, 0, 0, b"\x80\0\0\1"), (IGNORED, gone(PROTOCOL))),
    "frame larger than allowed": (frame(0, 0, 1, b"", length=16385), gone(SIZE)),
    "settings larger than allowed": (frame(4, 0, 0, b"", length=2**24 - 1), gone(SIZE)),
    # 4.3: header blocks
    "broken compression": (frame(1, END_STREAM | END_HEADERS, 1, b"\xff\xff\xff\xff\xff"), gone(COMPRESSION, PROTOCOL)),
    "index that is not in the table": (frame(1, END_STREAM | END_HEADERS, 1, b"\xfe"), gone(COMPRESSION, PROTOCOL)),
    "table made larger than allowed": (
        frame(1, END_STREAM | END_HEADERS, 1, b"\x3f\xff\xff\x03" + block(OK)),
        gone(COMPRESSION, PROTOCOL),
    ),
    "huffman padding of zeros": (frame(1, 5, 1, b"\x00\x81\x00\x81\x00"), gone(COMPRESSION, PROTOCOL)),
    "another stream within a block": (headers(1, OK, whole=False) + headers(3, OK), gone(PROTOCOL)),
    "ping within a block": (headers(1, OK, whole=False) + frame(6, 0, 0, b"12345678"), gone(PROTOCOL)),
    "unknown frame within a block": (headers(1, OK, whole=False) + frame(0xEE, 0, 1), gone(PROTOCOL)),
    "continuation of another stream": (headers(1, OK, whole=False) + frame(9, END_HEADERS, 3), gone(PROTOCOL)),
    "block in two frames": (
        frame(1, END_STREAM, 1, block(OK)[:5]) + frame(9, END_HEADERS, 1, block(OK)[5:]),
        Served(b"200"),
    ),
    # 5.1: states
    "data on an idle stream": (data(1), gone(PROTOCOL)),
    "reset of an idle stream": (frame(3, 0, 1, b"\0\0\0\x08"), (IGNORED, gone(PROTOCOL))),
    "window of an idle stream": (window(1, 1), (IGNORED, gone(PROTOCOL))),
    "continuation on an idle stream": (frame(9, END_HEADERS, 1), gone(PROTOCOL)),
    "data after the end": (headers(1, SLOW) + data(1), (Reset(CLOSED), gone(CLOSED))),
    "headers after the end": (headers(1, SLOW) + headers(1, OK), (Reset(CLOSED), gone(CLOSED))),
    "continuation after the end": (headers(1, SLOW) + frame(9, END_HEADERS, 1), gone(PROTOCOL, CLOSED)),
    "data after a reset": (OPEN + frame(3, 0, 1, b"\0\0\0\x08") + data(1), (Reset(CLOSED), IGNORED)),
    "window after a reset": (OPEN + frame(3, 0, 1, b"\0\0\0\x08") + window(1, 1), IGNORED),
    # 5.1.1: stream ids
    "even stream id": (headers(2, OK), gone(PROTOCOL)),
    "stream id that goes back": (headers(5, OK) + headers(3, OK), gone(PROTOCOL)),
    "stream 0": (headers(0, OK), gone(PROTOCOL)),
    # 5.3: priorities, which RFC 9113 has made meaningless
    "priority on itself": (frame(2, 0, 1, b"\0\0\0\1\0"), IGNORED),
    "headers that depend on themselves": (
        frame(1, END_STREAM | END_HEADERS | PRIORITY, 1, b"\0\0\0\1\0" + block(OK)),
        Served(b"200"),
    ),
    "priority of stream 0": (frame(2, 0, 0, bytes(5)), gone(PROTOCOL)),
    "priority of a wrong size": (frame(2, 0, 1, bytes(4)), (Reset(SIZE), gone(SIZE))),
    # 6.1: DATA
    "data on stream 0": (frame(0, 0, 0, b"x"), gone(PROTOCOL)),
    "padding as long as its frame": (OPEN + frame(0, PADDED, 1, b"\x02\0"), gone(PROTOCOL)),
    "padding that is all there is": (OPEN + frame(0, PADDED | END_STREAM, 1, b"\x01\0"), Served(b"200")),
    "more data than announced": (
        headers(1, [*READ, (b"content-length", b"1")], end=False) + data(1, b"xx", end=True),
        Reset(PROTOCOL),
    ),
    "less data than announced": (
        headers(1, [*READ, (b"content-length", b"3")], end=False) + data(1, b"xx", end=True),
        Reset(PROTOCOL),
    ),
    "more data than the window": (UNREAD + data(1, bytes(16384)) * 5, (Reset(FLOW_CONTROL), gone(FLOW_CONTROL))),
    # 6.2: HEADERS
    "padding longer than the headers": (
        frame(1, END_STREAM | END_HEADERS | PADDED, 1, b"\xff" + block(OK)),
        gone(PROTOCOL),
    ),
    # 6.4: RST_STREAM
    "reset of stream 0": (frame(3, 0, 0, b"\0\0\0\x08"), gone(PROTOCOL)),
    "reset of a wrong size": (OPEN + frame(3, 0, 1, b"\0\0\x08"), gone(SIZE)),
    # 6.5: SETTINGS
    "settings of a stream": (frame(4, 0, 1), gone(PROTOCOL)),
    "acknowledgement with settings": (frame(4, ACK, 0, bytes(6)), gone(SIZE, PROTOCOL)),
    "settings of a wrong size": (frame(4, 0, 0, bytes(5)), gone(SIZE)),
    "unknown setting": (setting(0xEE, 1), IGNORED),
    "push neither on nor off": (setting(2, 2), gone(PROTOCOL)),
    "window beyond its largest": (setting(4, 2**31), gone(FLOW_CONTROL)),
    "frames smaller than the smallest": (setting(5, 16383), gone(PROTOCOL)),
    "frames larger than the largest": (setting(5, 2**24), gone(PROTOCOL)),
    "no header table": (setting(1, 0) + headers(1, OK), Served(b"200")),
    # 6.6: PUSH_PROMISE
    "push from a client": (frame(5, END_HEADERS, 1, b"\0\0\0\2" + block(OK)), gone(PROTOCOL)),
    # 6.7: PING
    "ping of a stream": (frame(6, 0, 1, b"12345678"), gone(PROTOCOL)),
    "ping of a wrong size": (frame(6, 0, 0, b"1234567"), gone(SIZE)),
    "answer to no ping": (frame(6, ACK, 0, b"12345678"), IGNORED),
    # 6.8: GOAWAY
    "goaway of a stream": (frame(7, 0, 1, bytes(8)), gone(PROTOCOL)),
    "goaway, then nothing": (frame(7, 0, 0, bytes(8)), gone(NO_ERROR)),
    "goaway of a wrong size": (frame(7, 0, 0, bytes(3)), gone(SIZE)),
    # 6.9: WINDOW_UPDATE
    "increment of nothing": (window(0, 0), gone(PROTOCOL)),
    "increment of nothing for a stream": (OPEN + window(1, 0), (Reset(PROTOCOL), gone(PROTOCOL))),
    "increment of a wrong size": (frame(8, 0, 0, b"\0\0\1"), gone(SIZE)),
    "window overflow": (window(0, MOST) + window(0, MOST), gone(FLOW_CONTROL)),
    "window overflow of a stream": (OPEN + window(1, MOST), Reset(FLOW_CONTROL)),
    "settings that overflow a window": (OPEN + window(1, MOST - 65535) + setting(4, 65536), gone(FLOW_CONTROL)),
    # 8.1, 8.2, 8.3: requests
    "capital letter": (headers(1, [*OK, (b"X-a", b"1")]), Reset(PROTOCOL)),
    "unknown pseudo-header": (headers(1, [*OK, (b":x", b"1")]), Reset(PROTOCOL)),
    "pseudo-header of answers": (headers(1, [*OK, (b":status", b"200")]), Reset(PROTOCOL)),
    "pseudo-header behind others": (headers(1, [OK[0], (b"a", b"1"), *OK[1:]]), Reset(PROTOCOL)),
    "connection header": (headers(1, [*OK, (b"connection", b"keep-alive")]), Reset(PROTOCOL)),
    "te other than trailers": (headers(1, [*OK, (b"te", b"gzip")]), Reset(PROTOCOL)),
    "no scheme": (headers(1, [OK[0], OK[1], OK[3]]), Reset(PROTOCOL)),
    "path twice": (headers(1, [*OK[:2], (b":path", b"/"), *OK[2:]]), Reset(PROTOCOL)),
    "empty path": (headers(1, [OK[0], (b":path", b""), *OK[2:]]), (Reset(PROTOCOL), Served(b"400"))),
    "trailers": (OPEN + data(1) + headers(1, [(b"a", b"1")]), Served(b"200")),
    "trailers that are not the end": (OPEN + headers(1, [(b"a", b"1")], end=False), Reset(PROTOCOL)),
    "trailers with a pseudo-header": (OPEN + headers(1, [(b":method", b"GET")]), Reset(PROTOCOL)),
}
STARTS = {
    "no preface": frame(4, 0, 0),
    "half a preface, then garbage": b"PRI * HTTP/2.0\r\n\r\nSMoke\r\n\r\n",
    "preface of another version": b"PRI * HTTP/3.0\r\n\r\nSM\r\n\r\n",
    "ping before settings": HELLO[:24] + frame(6, 0, 0, b"12345678"),
}
STATUS_OF_START = {"no preface": 400, "preface of another version": 505}


async def what_happens(peer: RawH2Peer) -> object:
    """The fate of stream 1 or of the connection; a ping tells that all before it has been seen."""
    await peer.send(frame(6, 0, 0, b"the last"))

    def pinged() -> bool:
        return any(f.payload == b"the last" and f.flags & ACK for f in peer.of(PING))

    def fate() -> object | None:
        for f in peer.frames:
            if f.kind == RST_STREAM and f.stream_id == 1:
                return Reset(f.code)
            if f.kind == HEADERS and f.stream_id == 1:
                first = f.payload.lstrip(b" ")[0]  # behind a change of the table's size to 0
                return Served({0x88: b"200", 0x8C: b"400"}.get(first, f.payload[:5]))
        return None

    assert await peer.pump(lambda: pinged() or bool(peer.of(GOAWAY)), 10)
    if peer.goaway_code is None and fate() is None:
        await peer.pump(lambda: fate() is not None or bool(peer.of(GOAWAY)), 0.3)
    if peer.goaway_code is not None:
        assert await peer.closed(10)
        return gone(peer.goaway_code)
    return fate() or IGNORED


def fits(seen: object, expected: object) -> bool:
    if isinstance(expected, tuple):
        return any(fits(seen, each) for each in expected)
    if isinstance(expected, Gone):
        return isinstance(seen, Gone) and seen.codes[0] in expected.codes
    return seen == expected


@pytest.mark.parametrize("name", ROWS)
async def test_frames(name: str) -> None:
    sent, expected = ROWS[name]
    async with serving(keep_alive_timeout=9) as running:
        peer = await RawH2Peer.connect(running.port)
        await peer.send(HELLO + sent)
        assert fits(seen := await what_happens(peer), expected), f"{seen} is not {expected}"
        await peer.finish()
        assert await ask(running.port) == b"ok"
        assert await running.quiet() and await running.unconnected()


@pytest.mark.parametrize("name", STARTS)
async def test_starts(name: str) -> None:
    """What is not HTTP/2 from its first byte is answered as HTTP/1.1, or ended."""
    async with serving(header_timeout=0.5) as running:
        peer = await RawH2Peer.connect(running.port)
        await peer.send(STARTS[name])
        if name == "ping before settings":  # h2 does not insist, which harms nobody
            assert await peer.pump(lambda: bool(peer.of(PING)))
        else:
            assert await peer.closed() and peer.status == STATUS_OF_START.get(name)
        await peer.finish()
        assert await ask(running.port) == b"ok" and await running.unconnected()


def test_table_is_large_enough() -> None:
    assert len(ROWS) + len(STARTS) >= 40
