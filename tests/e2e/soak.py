"""Ten thousand clients that leave in every way, over both protocols, against a server that is full all the time.

``python -m tests.e2e.soak`` plays them and prints what it found; ``test_soak`` runs it in the suite. Afterwards every
counter is at its start value, no file is open, memory is what it was, and nothing but plain lines is in the log.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "guard"))
from guard_client import H2Peer, Peer, ask

from tests.e2e.fake_server import FakeServer

CHAT = "/v1/chat/completions"
AT_ONCE = 40
WARM_UP = 1500  # what is allocated once: pools, code, the first hash tables
OPTIONS = {
    "step_s": 0.002,
    "capacity": {"num_blocks": 600, "max_model_len": 4096},  # too small for eight of the longest: some are preempted
    "scheduler": {"max_queue": 64},
    "server": {"log_level": "info"},
}
HTTP1 = ("early", "half request", "FIN", "RST", "half close", "pipelined", "complete")
HTTP2 = ("RST_STREAM", "drop", "FIN", "GOAWAY", "half body", "complete", "one of many")
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "http_active_requests",
)


@dataclass
class Findings:
    """What a soak came to; ``problems`` is empty if all is well."""

    num_operations: int
    seconds: float
    rss_before_mib: float
    rss_after_mib: float
    ways: Counter[str]
    statuses: Counter[str]
    problems: list[str]


def content(rng: random.Random, max_tokens: int) -> bytes:
    text = "x" * rng.choice([1, 40, 600, 2500])
    body = {
        "model": "M",
        "messages": [{"role": "user", "content": text + str(rng.random())}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
        "n": rng.choice([1, 1, 1, 2]),
    }
    return json.dumps(body).encode()


def over(data: bytes) -> bool:
    return b"[DONE]" in data or b'"usage"' in data or b'"error"' in data


async def http1(port: int, rng: random.Random, how: str) -> None:
    peer = await Peer.connect(port, receive_buffer=rng.choice([None, None, 4096]))
    body = content(rng, rng.randint(1, 12) if how == "complete" else rng.choice([5, 60, 800]))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    if how == "half request":
        await peer.send(request[: rng.randrange(1, len(request))])
    elif how != "early":
        await peer.send(request)
    if how == "pipelined":
        await peer.send(request * rng.randint(1, 2) + b"GET /health HT"[: rng.randint(0, 14)])
    elif how == "half close":
        await peer.stream.send_eof()
    if how == "complete":
        assert await peer.pump(lambda: over(peer.data), 120), peer.data[-300:]
    elif how not in ("early", "half request"):
        await peer.pump(lambda: False, rng.choice([0, 0.005, 0.03, 0.15]))
    await (peer.reset() if how == "RST" or rng.random() < 0.2 else peer.finish())


async def http2(port: int, rng: random.Random, how: str) -> None:
    peer = await H2Peer.connect(port)
    streams: list[int] = []
    for _ in range(rng.randint(1, 4)):
        stream = peer.begin(CHAT, method="POST", end=False, headers=[("content-type", "application/json")])
        body = content(rng, rng.randint(1, 12) if how in ("complete", "one of many") else rng.choice([5, 60, 800]))
        peer.h2.send_data(stream, body[:50] if how == "half body" else body, end_stream=how != "half body")
        streams.append(stream)
    await peer.flush()
    if how == "one of many":  # the others flow on
        gone, *streams = streams
        await peer.cancel(gone)
    if how in ("complete", "one of many"):
        assert await peer.over(*streams, seconds=120)
        assert all(peer.streams[stream].ended for stream in streams)
    else:
        await peer.pump(lambda: False, rng.choice([0, 0.005, 0.03, 0.15]))
    if how == "RST_STREAM":
        await peer.cancel(*[stream for stream in streams if not peer.streams[stream].over])
        await peer.pump(lambda: False, 0.005)
    elif how == "GOAWAY":
        peer.h2.close_connection()
        await peer.flush()
    await (peer.reset() if how == "drop" else peer.finish())


Visit = Callable[[int, random.Random, str], Awaitable[None]]


async def storm(server: FakeServer, num_operations: int, seed: int, ways: Counter[str]) -> None:
    rng = random.Random(seed)
    kinds: list[tuple[Visit, str]] = [(http1, how) for how in HTTP1] + [(http2, how) for how in HTTP2]
    left = num_operations

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            visit, how = rng.choice(kinds)
            ways[f"{visit.__name__} {how}"] += 1
            try:
                await visit(server.port, random.Random(rng.random()), how)
            except OSError:
                assert server.is_alive, server.output[-2000:]
            Peer.all.clear()  # this client's own memory

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(work)


async def gauges(port: int) -> dict[str, float]:
    text = (await ask(port, "/metrics") or b"").decode()
    return {g: sum(float(v) for v in re.findall(rf"^aserve_{g}(?:{{.*}})? (\S+)$", text, re.MULTILINE)) for g in GAUGES}


async def at_rest(server: FakeServer, num_files: int) -> list[str]:
    """What is not at its start value after a while."""
    with trio.move_on_after(30):
        while any((await gauges(server.port)).values()) or server.num_files > num_files:
            await trio.sleep(0.1)
    problems = [f"{name} is {value}" for name, value in (await gauges(server.port)).items() if value]
    if server.num_files > num_files:
        problems.append(f"{server.num_files} open files, {num_files} before")
    return problems


async def soak(server: FakeServer, num_operations: int, seed: int) -> Findings:
    ways: Counter[str] = Counter()
    await storm(server, WARM_UP, seed, ways)
    problems = await at_rest(server, 16)  # a client's connections would be many more
    num_files = server.num_files
    before, started = server.rss_mib, time.monotonic()
    await storm(server, num_operations, seed + 1, ways)
    seconds = time.monotonic() - started
    problems += await at_rest(server, num_files)
    after = server.rss_mib
    if after > before * 1.05:
        problems.append(f"resident memory grew from {before:.1f} to {after:.1f} MiB")
    bad = re.findall(r"^.*(?:WARNING|ERROR|CRITICAL|Traceback).*$", server.output, re.MULTILINE)
    problems += bad[:5]
    statuses = Counter(re.findall(r"POST \S+ (\d+ \S+)", server.output))
    if server.stop() != 0:
        problems.append("the server did not end well")
    return Findings(num_operations, seconds, before, after, ways, statuses, problems)


def play(num_operations: int, seed: int = 1) -> Findings:
    with tempfile.TemporaryDirectory() as folder, FakeServer(Path(folder) / "log", **OPTIONS) as server:
        return trio.run(soak, server, num_operations, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    found = play(arguments.operations, arguments.seed)
    print(f"{found.num_operations} operations in {found.seconds:.0f} s, {dict(found.statuses)}")
    print(f"resident memory {found.rss_before_mib:.1f} MiB before, {found.rss_after_mib:.1f} MiB after")
    print("\n".join(found.problems) or "everything is at its start value")
    sys.exit(bool(found.problems))
