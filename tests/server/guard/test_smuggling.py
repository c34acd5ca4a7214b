"""HTTP/1.1 in shapes that two servers in a row may read differently: one meaning, or none and the connection's end.

A request is smuggled when a server takes for a request what the sender, or a proxy before it, took for a body. So in
each row ``/early`` must never be reached where it hides in a body, and nothing is answered twice.
"""

import pytest
import trio
from guard_client import Peer, ask, serving

pytestmark = pytest.mark.anyio

HIDDEN = b"GET /early HTTP/1.1\r\nHost: x\r\n\r\n"


def post(*headers: bytes, body: bytes = b"", host: bytes = b"Host: x") -> bytes:
    lines = [b"POST /read HTTP/1.1", host, *headers]
    return b"\r\n".join(line for line in lines if line) + b"\r\n\r\n" + body


def chunked(body: bytes, *headers: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked", *headers, body=body)


REFUSED = {
    "length and chunks": post(b"Content-Length: 4", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + HIDDEN),
    "chunks and length": post(b"Transfer-Encoding: chunked", b"Content-Length: 6", body=b"0\r\n\r\nX" + HIDDEN),
    "two lengths": post(b"Content-Length: 0", b"Content-Length: %d" % len(HIDDEN), body=HIDDEN),
    "list of lengths": post(b"Content-Length: 0, %d" % len(HIDDEN), body=HIDDEN),
    "length with a sign": post(b"Content-Length: +3", body=b"abc"),
    "negative length": post(b"Content-Length: -1", body=b"abc"),
    "length in hex": post(b"Content-Length: 0x3", body=b"abc"),
    "length with an underscore": post(b"Content-Length: 1_0", body=b"0123456789"),
    "length of nothing": post(b"Content-Length: ", body=b"abc"),
    "length in other digits": post(b"Content-Length: \xef\xbc\x93", body=b"abc"),
    "unknown coding": post(b"Transfer-Encoding: gzip", body=b"abc"),
    "coding behind chunked": post(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n" + HIDDEN),
    "chunked twice": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "coding with a tab": post(b"Transfer-Encoding:\x0bchunked", body=b"0\r\n\r\n" + HIDDEN),
    "blank before the colon": post(b"Transfer-Encoding : chunked", b"Content-Length: 3", body=b"abc"),
    "blank before a name": b"POST /read HTTP/1.1\r\n Transfer-Encoding: chunked\r\nHost: x\r\n\r\n0\r\n\r\n",
    "bare return in a value": post(b"X: a\rTransfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "null in a value": post(b"X: a\0b"),
    "name without a colon": post(b"Content-Length"),
    "empty name": post(b": x"),
    "no host": post(host=b""),
    "two hosts": post(b"Host: y"),
    "chunk size with a sign": chunked(b"+3\r\nabc\r\n0\r\n\r\n"),
    "chunk size in 0x": chunked(b"0x3\r\nabc\r\n0\r\n\r\n"),
    "chunk size of nothing": chunked(b"\r\nabc\r\n0\r\n\r\n"),
    "chunk size beyond 64 bits": chunked(b"1" + b"0" * 20 + b"\r\nabc"),
    "chunk longer than its size": chunked(b"2\r\nabc\r\n0\r\n\r\n"),
    "chunk without its end": chunked(b"3\r\nabcX\r\n0\r\n\r\n"),
    "two blanks in the first line": b"POST  /read HTTP/1.1\r\nHost: x\r\n\r\n",
    "a third word": b"POST /read x HTTP/1.1\r\nHost: x\r\n\r\n",
    "return in the target": b"POST /re\rad HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/1.10": b"POST /read HTTP/1.10\r\nHost: x\r\n\r\n",
    "http in small letters": b"POST /read http/1.1\r\nHost: x\r\n\r\n",
}

UNKNOWN = {"unknown coding", "coding behind chunked", "chunked twice"}  # RFC 9112, 6.1: 501

# one meaning, and all of what RFC 9112 has a server accept
ACCEPTED = {
    "length said twice": (post(b"Content-Length: 3", b"Content-Length: 3", body=b"abc"), b"3"),
    "bare line feeds": (b"POST /read HTTP/1.1\nHost: x\nContent-Length: 3\n\nabc", b"3"),
    "value folded over two lines": (post(b"X: a\r\n b", b"Content-Length: 3", body=b"abc"), b"3"),
    "chunk with an extension": (chunked(b"3;a=b\r\nabc\r\n0\r\n\r\n"), b"3"),
    "chunk size in capitals": (chunked(b"A\r\n0123456789\r\n0\r\n\r\n"), b"10"),
    "chunk size with zeros": (chunked(b"0003\r\nabc\r\n0\r\n\r\n"), b"3"),
    "trailers": (chunked(b"3\r\nabc\r\n0\r\nContent-Length: 50\r\n\r\n"), b"3"),
    "Chunked in capitals": (post(b"Transfer-Encoding: CHUNKED", body=b"3\r\nabc\r\n0\r\n\r\n"), b"3"),
    "empty lines first": (b"\r\n\r\n" + post(b"Content-Length: 3", body=b"abc"), b"3"),
    "request in a body": (post(b"Content-Length: %d" % len(HIDDEN), body=HIDDEN), b"%d" % len(HIDDEN)),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused(name: str) -> None:
    async with serving(header_timeout=0.6, keep_alive_timeout=0.6) as running:
        peer = await Peer.connect(running.port)
        await peer.send(REFUSED[name])
        assert await peer.closed(10)
        answers = bytes(peer.data).count(b"HTTP/1.1 ")
        assert answers == 1 and peer.status == (501 if name in UNKNOWN else 400), bytes(peer.data)
        assert "/early" not in running.app.seen
        assert await ask(running.port) == b"ok" and await running.quiet()


@pytest.mark.parametrize("name", ACCEPTED)
async def test_accepted(name: str) -> None:
    sent, answer = ACCEPTED[name]
    async with serving(keep_alive_timeout=9) as running:
        peer = await Peer.connect(running.port)
        await peer.send(sent)
        assert await peer.until(b"\r\n\r\n" + answer) and peer.status == 200, bytes(peer.data)
        await peer.get("/ok")
        assert await peer.until(b"\r\n\r\nok"), bytes(peer.data)
        assert running.app.seen == ["/read", "/ok"]


@pytest.mark.parametrize("step", [1, 2, 7])
async def test_requests_in_pieces(step: int) -> None:
    """However a request is cut into packets, it is the same request."""
    async with serving(keep_alive_timeout=9) as running:
        for sent, answer in (ACCEPTED["chunk with an extension"], ACCEPTED["value folded over two lines"]):
            peer = await Peer.connect(running.port)
            for start in range(0, len(sent), step):
                await peer.send(sent[start : start + step])
                await trio.lowlevel.checkpoint()
            assert await peer.until(b"\r\n\r\n" + answer) and peer.status == 200
