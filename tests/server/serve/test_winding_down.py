"""The drain as connections see it: what is open may finish, and is asked to go elsewhere."""

import json
import re
import signal
from pathlib import Path

import httpx
import pytest
import trio
from guard_client import H2Peer, Peer, client_tls, make_certificate
from serve_clients import CHAT, body, get, post, raw_stream

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]


async def in_thread(function, *args):
    return await trio.to_thread.run_sync(function, *args)


async def runs(port: int) -> bool:
    """Whether a sequence is being computed."""
    text = (await in_thread(get, port, "/metrics")).text
    return re.search(r"num_requests_running\S* [1-9]", text) is not None


async def begin(peer: H2Peer, max_tokens: int) -> int:
    stream = peer.begin(CHAT, method="POST", end=False, headers=[("content-type", "application/json")])
    peer.h2.send_data(stream, json.dumps(body(max_tokens)).encode(), end_stream=True)
    await peer.flush()
    return stream


async def test_sigterm_winds_connections_down(start) -> None:
    """Idle HTTP/2 leaves at once with GOAWAY, busy HTTP/2 after its stream; HTTP/1.1 says close; new work is 503."""
    process = start(step_s=0.01)
    port = await in_thread(process.ready)
    idle, busy, kept = [await kind.connect(port) for kind in (H2Peer, H2Peer, Peer)]
    first = await idle.request("/health")
    assert await idle.over(first, seconds=20) and idle.streams[first].status == 200
    stream = await begin(busy, 150)
    assert await busy.pump(lambda: b"data:" in busy.streams[stream].data, 20)
    await kept.get("/health")
    assert await kept.until(b'"ok"', 20) and b"connection: close" not in kept.data
    process.signal()
    assert await idle.closed(20) and idle.goaway and idle.goaway_code == 0
    kept.data.clear()
    await kept.get("/ready")
    assert await kept.closed(20) and kept.status == 503 and b"connection: close" in kept.data
    late = await H2Peer.connect(port)
    refused, more = await begin(late, 5), await begin(busy, 5)
    assert await late.over(refused, seconds=20) and late.streams[refused].status == 503
    assert await late.closed(20) and late.goaway
    assert await busy.over(stream, more, seconds=20) and busy.streams[more].status == 503
    assert b"[DONE]" in busy.streams[stream].data and busy.streams[stream].ended
    assert await busy.closed(20) and busy.goaway_code == 0
    assert await in_thread(process.wait) == 0


class SmallWindow(H2Peer):
    """Opens its windows no further: h2's initial one may hold all of an answer in few pieces."""

    window_updates = False
    initial_window = 4096


@pytest.mark.parametrize("kind", ["http1", "http2"])
async def test_slow_reader(start, kind: str) -> None:
    """A client that does not read: its sequence runs on to its end, and its tokens wait for it in few pieces."""
    process = start(step_s=0.0)
    port = await in_thread(process.ready)
    if kind == "http1":
        sock = await in_thread(raw_stream, port, 3000)
    else:
        peer = await SmallWindow.connect(port)
        stream = await begin(peer, 3000)
        assert await peer.pump(lambda: b"data:" in peer.streams[stream].data, 20)
        await peer.pump(lambda: False, 2)  # until the windows are full
    with trio.fail_after(60):
        while await runs(port):
            await trio.sleep(0.05)
    if kind == "http1":
        text = await in_thread(rest_of_stream, sock)
    else:
        assert not peer.streams[stream].over
        peer.window_updates = True
        peer.h2.increment_flow_control_window(2**24)
        peer.h2.increment_flow_control_window(2**24, stream)
        await peer.flush()
        assert await peer.over(stream, seconds=30) and peer.streams[stream].ended
        text = bytes(peer.streams[stream].data)
    assert b"[DONE]" in text and b'"finish_reason":"length"' in text
    assert text.count(b"chat.completion.chunk") < 2000
    process.signal()
    assert await in_thread(process.wait) == 0


def rest_of_stream(sock) -> bytes:
    data = b""
    while not data.endswith(b"0\r\n\r\n") and (part := sock.recv(65536)):
        data += part
    sock.close()
    return data


async def test_reader_that_never_comes_back(start) -> None:
    """After the stall timeout its request is aborted and its stream reset; its connection's other streams go on."""
    process = start(step_s=0.002, server={"stall_timeout_s": 1.0})
    port = await in_thread(process.ready)
    peer = await H2Peer.connect(port)
    peer.window_updates = False
    stuck = await begin(peer, 16000)
    assert await peer.pump(lambda: peer.streams[stuck].reset is not None, 60)
    await in_thread(process.says, r"499 \w+")
    peer.h2.increment_flow_control_window(2**20)
    other = await begin(peer, 5)
    assert await peer.over(other, seconds=20) and peer.streams[other].ended
    assert not await runs(port)
    process.signal()
    assert await in_thread(process.wait) == 0


async def test_hangup_reads_the_certificate_again(start, tmp_path: Path) -> None:
    """SIGHUP: new connections get the new certificate; a broken one changes nothing but the log."""
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    known = make_certificate(tmp_path, "known")
    pair = tmp_path / "cert.pem", tmp_path / "key.pem"
    for source, target in zip(first, pair, strict=True):
        target.write_bytes(source.read_bytes())
    files = {"tls_certificate": str(pair[0]), "tls_key": str(pair[1]), "tls_client_ca": str(known[0])}
    process = start(server=files)
    await in_thread(process.ready)

    def status(trusted: Path, *, client: bool = True) -> int | None:
        context = client_tls(trusted)
        if client:
            context.load_cert_chain(*known)
        try:
            return httpx.get(f"https://127.0.0.1:{process.port}/health", verify=context, trust_env=False).status_code
        except httpx.HTTPError:
            return None

    assert await in_thread(status, first[0]) == 200 and await in_thread(status, second[0]) is None
    assert await in_thread(lambda: status(first[0], client=False)) is None
    for source, target in zip(second, pair, strict=True):
        target.write_bytes(source.read_bytes())
    process.signal(signal.SIGHUP)
    await in_thread(process.says, "was read again")
    assert await in_thread(status, second[0]) == 200 and await in_thread(status, first[0]) is None
    pair[0].write_text("nothing of use")
    process.signal(signal.SIGHUP)
    await in_thread(process.says, "the old ones stay")
    assert await in_thread(status, second[0]) == 200
    process.signal()
    assert await in_thread(process.wait) == 0


async def test_expectation_of_a_body_that_is_too_large(start) -> None:
    """The 413 is the only answer, at once, and the connection ends: the client sends nothing."""
    process = start(server={"max_body_bytes": 1000})
    port = await in_thread(process.ready)
    peer = await Peer.connect(port)
    fields = ("Content-Type: application/json", "Content-Length: 5000", "Expect: 100-continue")
    await peer.get(CHAT, *fields, method="POST")
    assert await peer.closed(20) and peer.status == 413 and b"HTTP/1.1 100" not in peer.data
    assert (await in_thread(post, port, 3)).status_code == 200
    process.signal()
    assert await in_thread(process.wait) == 0
