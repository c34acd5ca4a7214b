"""One function per fault of stock hypercorn 0.18: plays the client, and says whether the server behaves.

``test_faults`` expects True from each against the guarded server, ``test_upstream`` False against the stock one.
"""

from __future__ import annotations

import trio
from guard_client import HELLO, PREFACE, H2Peer, Narrow, Peer, RawH2Peer, ask, count, settles
from h2.settings import Settings
from hpack import Encoder
from hyperframe.frame import GoAwayFrame, HeadersFrame, PingFrame, PriorityFrame

LATIN = b"\xe9"


def headers_frame(stream_id: int, *fields: tuple[bytes, bytes], end: bool = True) -> bytes:
    """A HEADERS frame, with whatever is in it."""
    frame = HeadersFrame(stream_id, data=Encoder().encode(list(fields), huffman=False))
    frame.flags |= {"END_HEADERS", "END_STREAM"} if end else {"END_HEADERS"}
    return frame.serialize()


async def lives(port: int) -> bool:
    return await ask(port) == b"ok"


async def _beside_a_stream(port: int, hurt: bytes, *, hello: bool = True) -> bool:
    """Whether another connection's stream goes on while a connection says ``hurt``."""
    bystander = await H2Peer.connect(port)
    stream = await bystander.request("/raw?n=25&ms=10")
    await bystander.pump(lambda: bool(bystander.streams[stream].data))
    evil = await Peer.connect(port)
    await evil.send((PREFACE + b"\0\0\0\x04\0\0\0\0\0" if hello else b"") + hurt)
    await evil.pump(lambda: False, 0.15)
    await evil.finish()
    whole = await bystander.over(stream) and bystander.streams[stream].ended
    await bystander.finish()
    return whole and await lives(port)


async def goaway_ends_the_process(port: int) -> bool:
    """Hypercorn's end of a connection collides with its sender, some of the time."""
    for _ in range(12):
        peer = await H2Peer.connect(port)
        for _ in range(16):
            peer.begin("/raw?n=100&ms=1")
        await peer.flush()
        await peer.pump(lambda: False, 0.05)
        await peer.send(GoAwayFrame(0).serialize())
        await peer.pump(lambda: False, 0.03)
        await peer.finish()
        if not await lives(port):
            return False
    return True


async def goaway_cuts_streams(port: int) -> bool:
    peer = await H2Peer.connect(port)
    streams = [await peer.request("/raw?n=20&ms=5") for _ in range(4)]
    await peer.pump(lambda: all(peer.streams[s].data for s in streams))
    await peer.send(GoAwayFrame(0).serialize())
    whole = await peer.over(*streams) and all(peer.streams[s].ended for s in streams)
    return whole and await peer.closed()


async def body_after_an_early_answer(port: int) -> bool:
    peer = await H2Peer.connect(port)
    early = await peer.request("/early", method="POST", end=False)
    other = await peer.request("/raw?n=20&ms=10")
    await peer.over(early)
    for _ in range(3):
        peer.h2.send_data(early, b"x" * 10000)
        await peer.flush()
        await peer.pump(lambda: False, 0.02)
    whole = await peer.over(other) and peer.streams[other].ended
    await peer.finish()
    return whole and peer.streams[early].status == 413 and await lives(port)


async def websocket_with_a_trailing_byte(port: int) -> bool:
    upgrade = (
        b"GET /ok HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\nx"
    )
    return await _beside_a_stream(port, upgrade, hello=False)


async def connect_without_a_path(port: int) -> bool:
    return await _beside_a_stream(port, headers_frame(1, (b":method", b"CONNECT"), (b":authority", b"x:1")))


async def latin_path(port: int) -> bool:
    fields = [(b":method", b"GET"), (b":path", b"/caf" + LATIN), (b":scheme", b"http"), (b":authority", b"x")]
    return await _beside_a_stream(port, headers_frame(1, *fields))


async def latin_method(port: int) -> bool:
    fields = [(b":method", b"G" + LATIN), (b":path", b"/"), (b":scheme", b"http"), (b":authority", b"x")]
    return await _beside_a_stream(port, headers_frame(1, *fields))


async def many_priorities(port: int) -> bool:
    return await _beside_a_stream(port, b"".join(PriorityFrame(2 * n + 1).serialize() for n in range(1200)))


async def one_stream_too_many(port: int) -> bool:
    peer = await H2Peer.connect(port)
    streams = [peer.begin("/raw?n=20&ms=10") for _ in range(32)]
    await peer.flush()
    await peer.pump(lambda: all(peer.streams[s].data for s in streams))
    peer.h2.remote_settings = Settings(client=False)  # the client does not keep to the announced limit
    extra = peer.begin("/ok")
    await peer.flush()
    whole = await peer.over(*streams, extra) and all(peer.streams[s].ended for s in streams)
    await peer.finish()
    return whole and peer.streams[extra].reset == 7


async def _reset_tells(port: int, path: str) -> bool:
    peer = await H2Peer.connect(port)
    stream = await peer.request(path)
    over = await peer.over(stream, seconds=1.5)
    await peer.finish()
    return over and peer.streams[stream].reset == 2


async def failure_within_an_answer(port: int) -> bool:
    return await _reset_tells(port, "/fail-late")


async def unfinished_answer(port: int) -> bool:
    return await _reset_tells(port, "/unfinished")


async def no_backpressure(port: int) -> bool:
    before = (await count(port))["sent"]
    peer = await Narrow.connect(port)
    await peer.request("/flood?kib=4096")
    await peer.pump(lambda: False, 0.5)
    taken = (await count(port))["sent"] - before
    await peer.finish()
    return taken <= 64 * 1024 and await settles(port)


async def lost_disconnects(port: int) -> bool:
    for _ in range(25):
        peers = [await H2Peer.connect(port) for _ in range(4)]
        for peer in peers:
            for _ in range(8):
                peer.begin("/watch?n=10000&ms=3")
            await peer.flush()
        await trio.sleep(0.004)
        for peer in peers:
            await peer.reset()
    return await settles(port, 2)


async def close_is_forgotten(port: int) -> bool:
    peer = await Peer.connect(port)
    await peer.get("/watch?n=2&ms=1", "Connection: close")
    closed = await peer.closed(1)
    await peer.finish()
    return closed


async def idle_timer_is_forgotten(port: int) -> bool:
    peer = await Peer.connect(port)
    await peer.get("/watch?n=2&ms=1")
    assert await peer.until(b"0\r\n\r\n")
    closed = await peer.closed(1.2)  # keep_alive_timeout is 0.4
    await peer.finish()
    return closed


async def idle_timer_after_a_reset(port: int) -> bool:
    peer = await H2Peer.connect(port)
    stream = await peer.request("/stream")
    await peer.pump(lambda: bool(peer.streams[stream].data))
    await peer.cancel(stream)
    closed = await peer.closed(1.2)
    await peer.finish()
    return closed


async def first_request_never_comes(port: int) -> bool:
    """On HTTP/2, where stock hypercorn stops its timer at the preface."""
    peer = await Peer.connect(port)
    await peer.send(PREFACE)
    closed = await peer.closed(1.2)
    await peer.finish()
    return closed


async def sender_of_a_dead_connection(port: int) -> bool:
    """A sender that waits for the peer's window when the connection dies."""
    peer = await Narrow.connect(port)
    await peer.request("/stuck?kib=256")
    await peer.pump(lambda: False, 0.2)
    await peer.reset()
    return await settles(port, 2)


async def left_while_pipelining(port: int) -> bool:
    """A client that has sent more bytes behind its request, and leaves during prefill."""
    peer = await Peer.connect(port)
    await peer.get("/prefill?ms=4000")
    await trio.sleep(0.1)
    await peer.send(b"GET /ok HTTP/1.1\r\nHo")
    await trio.sleep(0.1)
    await peer.finish()
    return await settles(port, 2)


async def early_answer_is_lost(port: int) -> bool:
    """An answer to an upload that goes on must reach a client that reads it only later."""
    for _ in range(5):
        peer = await Peer.connect(port)
        await peer.get("/early", "Content-Length: 3000000", method="POST")
        await trio.sleep(0.02)
        for _ in range(20):
            await peer.send(b"x" * 50000)
        await peer.until(b"too large", 2)
        if peer.status != 413:
            return False
        await peer.finish()
    return True


async def unread_body_holds_up_siblings(port: int) -> bool:
    """An app that reads nothing of its upload: the other streams of its connection go on."""
    peer = await H2Peer.connect(port)
    upload = await peer.request("/raw?n=60&ms=20", method="POST", end=False)
    for _ in range(14):  # more messages than hypercorn queues for an app
        peer.h2.send_data(upload, b"x" * 100)
        await peer.flush()
        await peer.pump(lambda: False, 0.02)
    other = await peer.request("/ok")
    answered = await peer.over(other, seconds=0.5)
    await peer.finish()
    return answered


async def flood_of_pings(port: int) -> bool:
    """Frames that carry nothing, without an end: the connection is ended."""
    peer = await RawH2Peer.connect(port)
    await peer.send(HELLO)
    for _ in range(20):
        await peer.send(PingFrame(0, opaque_data=b"12345678").serialize() * 200)
        await peer.pump(lambda: False, 0.005)
    return peer.goaway_code == 11 or await peer.closed(0.1)


async def malformed_request_ends_siblings(port: int) -> bool:
    peer = await H2Peer.connect(port)
    sibling = await peer.request("/raw?n=20&ms=10")
    odd = peer.begin("/ok", headers=[("x", "y")])
    peer.h2.data_to_send()
    fields = [(b":method", b"GET"), (b":path", b"/ok"), (b":scheme", b"http"), (b":authority", b"x")]
    await peer.send(headers_frame(odd, *fields, (b"connection", b"close")))
    whole = await peer.over(sibling, odd) and peer.streams[sibling].ended and peer.streams[odd].reset == 1
    await peer.finish()
    return whole


async def overlong_frame_is_awaited(port: int) -> bool:
    """A frame of 16 MB that is announced is refused at once, and not when it is in memory."""
    peer = await RawH2Peer.connect(port)
    await peer.send(HELLO + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01")
    refused = await peer.pump(lambda: peer.goaway_code is not None, 0.3)
    await peer.finish()
    return refused


async def length_beside_chunks(port: int) -> bool:
    """A request with both is refused, since a proxy may have taken the other for its end."""
    peer = await Peer.connect(port)
    await peer.get("/read", "Content-Length: 4", "Transfer-Encoding: chunked", method="POST")
    await peer.send(b"0\r\n\r\n")
    await peer.until(b"HTTP/1.1 ", 1)
    await peer.finish()
    return peer.status == 400


async def continue_before_a_refusal(port: int) -> bool:
    """A client that asks before it sends its body is not asked for the body that is then refused."""
    peer = await Peer.connect(port)
    await peer.get("/early", "Content-Length: 4", "Expect: 100-continue", method="POST")
    await peer.until(b"too large", 1)
    await peer.finish()
    return b" 413 " in peer.data and b"HTTP/1.1 100" not in peer.data


FAULTS = {
    f.__name__: f
    for f in (
        goaway_ends_the_process,
        goaway_cuts_streams,
        body_after_an_early_answer,
        websocket_with_a_trailing_byte,
        connect_without_a_path,
        latin_path,
        latin_method,
        many_priorities,
        one_stream_too_many,
        failure_within_an_answer,
        unfinished_answer,
        no_backpressure,
        lost_disconnects,
        close_is_forgotten,
        idle_timer_is_forgotten,
        idle_timer_after_a_reset,
        first_request_never_comes,
        sender_of_a_dead_connection,
        left_while_pipelining,
        early_answer_is_lost,
        unread_body_holds_up_siblings,
        flood_of_pings,
        malformed_request_ends_siblings,
        overlong_frame_is_awaited,
        length_beside_chunks,
        continue_before_a_refusal,
    )
}
