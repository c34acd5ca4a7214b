"""Hundreds of clients that leave in every way: afterwards the server is as it was before."""

import logging
import os
import random

import pytest
import trio
from guard_client import H2Peer, Peer, Running, ask, serving
from hyperframe.frame import GoAwayFrame

pytestmark = pytest.mark.anyio

OPERATIONS = 300
AT_ONCE = 12
HTTP1 = ("half request", "close in prefill", "finish", "reset", "half close", "complete", "pipeline")
HTTP2 = ("reset all", "drop", "goaway", "goaway and drop", "half body", "complete", "half preface")


async def http1(running: Running, rng: random.Random, how: str) -> None:
    peer = await Peer.connect(running.port, receive_buffer=rng.choice([None, None, 4096]))
    if how == "half request":
        await peer.send(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc"[: rng.randint(1, 66)])
    elif how == "close in prefill":
        await peer.get("/stream?n=50&ms=5&wait=300")
        await trio.sleep(rng.random() * 0.2)
    elif how == "complete":
        await peer.get(f"/stream?n={rng.randint(1, 30)}&ms=2")
        assert await peer.until(b"[DONE]", 20)
    else:
        await peer.get("/stream?n=200&ms=3")
        if how == "pipeline":
            await peer.send(b"GET /stream?n=3&ms=1 HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        await peer.until(b"data", 20)
        await peer.pump(lambda: False, rng.random() * 0.1)
    if how == "half close":
        await peer.stream.send_eof()
        await trio.sleep(0.01)
    await (peer.reset() if how == "reset" else peer.finish())


async def http2(running: Running, rng: random.Random, how: str) -> None:
    if how == "half preface":
        peer = await Peer.connect(running.port)
        await peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: rng.randint(1, 24)])
        await peer.finish()
        return
    peer = await H2Peer.connect(running.port)
    length = rng.randint(1, 30) if how == "complete" else 200
    streams = [peer.begin(f"/stream?n={length}&ms=3&wait={rng.choice([0, 50])}") for _ in range(rng.randint(1, 5))]
    if how == "half body":
        upload = peer.begin("/read", method="POST", end=False)
        peer.h2.send_data(upload, b"x" * 100)
    await peer.flush()
    if how == "complete":
        assert await peer.over(*streams, seconds=20) and all(peer.streams[s].ended for s in streams)
    else:
        await peer.pump(lambda: False, rng.random() * 0.15)
    if how == "reset all":
        await peer.cancel(*[s for s in streams if not peer.streams[s].over])
        await peer.pump(lambda: False, rng.random() * 0.02)
    elif how.startswith("goaway"):
        await peer.send(GoAwayFrame(0).serialize())
        if how == "goaway":
            await peer.pump(lambda: False, 0.05)
    await (peer.reset() if rng.random() < 0.5 else peer.finish())


async def soak(running: Running, operations: int, seed: int) -> None:
    rng = random.Random(seed)
    jobs = [rng.choice([(http1, how) for how in HTTP1] + [(http2, how) for how in HTTP2]) for _ in range(operations)]

    async def work() -> None:
        while jobs:
            client, how = jobs.pop()
            await client(running, random.Random(rng.random()), how)

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(work)


@pytest.mark.parametrize("seed", [1])
async def test_soak(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as running:
        assert await ask(running.port) == b"ok"
        assert await running.unconnected()
        before = len(os.listdir("/proc/self/fd"))
        await soak(running, OPERATIONS, seed)
        assert await running.quiet(), f"{running.app.running} handlers are left"
        assert await running.unconnected()
        assert len(os.listdir("/proc/self/fd")) <= before
        assert await ask(running.port) == b"ok"
        running.server.stop(1)
        with trio.fail_after(3):
            await running.ended.wait()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
