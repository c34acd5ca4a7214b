"""Clients that leave in every way, against a whole server process: afterwards it holds nothing of theirs."""

import json
import os
import random
import re
import signal

import pytest
import trio
from guard_client import H2Peer, Peer, ask

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

OPERATIONS = 150
AT_ONCE = 12
CHAT = "/v1/chat/completions"
HOW = ("half request", "early", "finish", "reset", "half close", "complete", "pipeline")
HOW_HTTP2 = ("reset all", "drop", "half body", "complete")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def content(rng: random.Random, max_tokens: int) -> bytes:
    """A request body; the system prompt's length makes prefills of one step and of several."""
    messages = [
        {"role": "system", "content": "x" * rng.choice([10, 600, 3000])},
        {"role": "user", "content": str(rng.random())},
    ]
    more = {"max_tokens": max_tokens, "ignore_eos": True, "stream": rng.random() < 0.7, "n": rng.choice([1, 1, 2])}
    return json.dumps({"model": "M", "messages": messages} | more).encode()


async def http1(port: int, rng: random.Random, how: str) -> None:
    peer = await Peer.connect(port, receive_buffer=rng.choice([None, 4096]))
    body = content(rng, rng.randint(1, 20) if how == "complete" else 1000)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    await peer.send(request[: rng.randrange(len(request))] if how == "half request" else request)
    if how == "complete":
        assert await peer.pump(lambda: b"[DONE]" in peer.data or b'"usage"' in peer.data, 60), peer.data[-300:]
    elif how == "pipeline":
        await peer.send(request)
    elif how == "half close":
        await peer.stream.send_eof()
    if how not in ("early", "half request"):
        await peer.pump(lambda: False, rng.random() * 0.2)
    await (peer.reset() if how == "reset" else peer.finish())


async def http2(port: int, rng: random.Random, how: str) -> None:
    peer = await H2Peer.connect(port)
    streams = []
    for _ in range(rng.randint(1, 4)):
        stream = peer.begin(CHAT, method="POST", end=False, headers=[("content-type", "application/json")])
        body = content(rng, rng.randint(1, 20) if how == "complete" else 1000)
        peer.h2.send_data(stream, body[:100] if how == "half body" else body, end_stream=how != "half body")
        streams.append(stream)
    await peer.flush()
    if how == "complete":
        assert await peer.over(*streams, seconds=60) and all(peer.streams[s].ended for s in streams)
    else:
        await peer.pump(lambda: False, rng.random() * 0.2)
    if how == "reset all":
        await peer.cancel(*[s for s in streams if not peer.streams[s].over])
        await peer.pump(lambda: False, 0.01)
    await (peer.reset() if rng.random() < 0.5 else peer.finish())


async def soak(port: int, operations: int, seed: int) -> None:
    rng = random.Random(seed)
    jobs = [rng.choice([(http1, how) for how in HOW] + [(http2, how) for how in HOW_HTTP2]) for _ in range(operations)]

    async def work() -> None:
        while jobs:
            client, how = jobs.pop()
            await client(port, random.Random(rng.random()), how)

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(work)


async def gauges(port: int) -> dict[str, float]:
    text = (await ask(port, "/metrics") or b"").decode()
    return {g: sum(float(v) for v in re.findall(rf"^\S*{g}(?:{{.*}})? (\S+)$", text, re.M)) for g in GAUGES}


@pytest.mark.parametrize("seed", [1])
async def test_nothing_is_left(start, seed: int) -> None:
    process = start(step_s=0.002)
    port = await trio.to_thread.run_sync(process.ready)
    await soak(port, 20, seed=0)  # what is opened once and kept
    before = len(os.listdir(f"/proc/{process.pid}/fd"))
    await soak(port, OPERATIONS, seed)
    with trio.move_on_after(20):
        while any((await gauges(port)).values()):
            await trio.sleep(0.05)
    assert await gauges(port) == dict.fromkeys(GAUGES, 0)
    with trio.move_on_after(5):
        while len(os.listdir(f"/proc/{process.pid}/fd")) > before:
            await trio.sleep(0.05)
    assert len(os.listdir(f"/proc/{process.pid}/fd")) <= before
    process.signal(signal.SIGTERM)
    assert await trio.to_thread.run_sync(process.wait) == 0
    assert not re.search("WARNING|ERROR|CRITICAL|Traceback", process.output), process.output[-2000:]
