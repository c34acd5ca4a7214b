"""What overload does to those who are served, and to those who are not: ``python -m tests.benchmarks.overload``.

Requests come at random (Poisson) at the rate that the server can just serve, then at four times that rate, each on its
own connection; their answers have 8 to 32 tokens. The queue has a limit in seconds, by which what would wait longer is
refused at once. The server is a process of its own over ``FakeExecutor`` with a step time like a real model's, so that
neither weights nor a GPU are needed. Served requests are compared with the text that the model must give, token by
token; refused ones must be 429 or 503 with ``Retry-After``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "guard"))
from guard_client import Peer, ask

from aserve.testing import hash_letter
from tests.e2e.fake_server import FakeServer

STEP_S = 0.05
NUM_SEQS = 16
NUM_TOKENS = (8, 32)
CAPACITY_PER_S = NUM_SEQS / (sum(NUM_TOKENS) / 2 * STEP_S)
MAX_TTFT_RATIO = 1.3
MAX_REFUSAL_S = 0.05
PATH = "/v1/completions"


@dataclass
class Outcome:
    """What one load came to; times in seconds."""

    first_token: list[float] = field(default_factory=list)
    refusal: list[float] = field(default_factory=list)
    num_sent: int = 0
    wrong: list[str] = field(default_factory=list)


def expected(prompt: str, num_tokens: int) -> str:
    tokens = list(prompt.encode())
    for _ in range(num_tokens):
        tokens.append(hash_letter(tokens, 0))
    return bytes(tokens[-num_tokens:]).decode()


def text_of(data: bytes) -> str:
    events = re.findall(r"^data: (\{.*\})$", data.decode(), re.MULTILINE)
    return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", ()))


async def one(port: int, number: int, outcome: Outcome) -> None:
    prompt = f"request {number} " + "x" * 60
    num_tokens = random.Random(number).randint(*NUM_TOKENS)
    fields = {"model": "M", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps({**fields, "temperature": 0}).encode()
    peer = await Peer.connect(port)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    begin = trio.current_time()
    await peer.send(head.encode() + body)
    await peer.pump(lambda: b'"text":"' in peer.data or b'"error"' in peer.data, 120)
    seconds = trio.current_time() - begin
    if peer.status == 200:
        outcome.first_token.append(seconds)
        await peer.pump(lambda: b"[DONE]" in peer.data, 120)
        if text_of(bytes(peer.data)) != expected(prompt, num_tokens) or peer.data.count(b"[DONE]") != 1:
            outcome.wrong.append(f"request {number}: {bytes(peer.data)[-200:]!r}")
    elif peer.status in (429, 503) and b"retry-after:" in peer.data.lower():
        outcome.refusal.append(seconds)
    else:
        outcome.wrong.append(f"request {number}: {bytes(peer.data)[:200]!r}")
    await peer.finish()
    Peer.all.clear()


async def load(port: int, rate_per_s: float, seconds: float, first: int) -> Outcome:
    outcome, rng = Outcome(), random.Random(first)
    async with trio.open_nursery() as nursery:
        end = next_s = trio.current_time()
        end += seconds
        while next_s < end:
            await trio.sleep_until(next_s)
            nursery.start_soon(one, port, first + outcome.num_sent, outcome)
            outcome.num_sent += 1
            next_s += rng.expovariate(rate_per_s)
    return outcome


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def described(name: str, outcome: Outcome) -> str:
    served, refused = outcome.first_token, outcome.refusal
    return (
        f"{name}: {outcome.num_sent} sent, {len(served)} served, {len(refused)} refused, {len(outcome.wrong)} wrong; "
        f"TTFT p50 {quantile(served, 0.5) * 1000:.0f} ms, p99 {quantile(served, 0.99) * 1000:.0f} ms; "
        f"refusals p50 {quantile(refused, 0.5) * 1000:.1f} ms, p99 {quantile(refused, 0.99) * 1000:.1f} ms, "
        f"most {max(refused, default=0) * 1000:.1f} ms"
    )


async def counted(port: int) -> int:
    text = (await ask(port, "/metrics") or b"").decode()
    lines = re.findall(rf'^aserve_http_requests_total{{.*route="{PATH}".*}} (\S+)$', text, re.MULTILINE)
    return int(sum(map(float, lines)))


async def measure(server: FakeServer, seconds: float) -> list[str]:
    """Print both loads; what is worse than promised."""
    await load(server.port, CAPACITY_PER_S / 2, 3.0, 10**6)  # so that nothing is done for the first time
    before = await counted(server.port)
    usual = await load(server.port, CAPACITY_PER_S, seconds, 0)
    print(described("1x", usual))
    over = await load(server.port, 4 * CAPACITY_PER_S, seconds, 10**5)
    print(described("4x", over))
    problems = usual.wrong + over.wrong
    ratio = quantile(over.first_token, 0.99) / quantile(usual.first_token, 0.99)
    print(f"p99 TTFT at 4x is {ratio:.2f} times that at 1x")
    if ratio > MAX_TTFT_RATIO:
        problems.append(f"the time to the first token grew by a factor of {ratio:.2f}")
    if quantile(over.refusal, 0.99) > MAX_REFUSAL_S:
        problems.append(f"refusals took {quantile(over.refusal, 0.99) * 1000:.0f} ms")
    if await counted(server.port) - before != usual.num_sent + over.num_sent:
        problems.append("the server has not counted as many requests as were sent")
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--max-queue", type=int, default=16)
    parser.add_argument("--max-queue-wait", type=float, default=0.4, help="seconds")
    arguments = parser.parse_args()
    options = {
        "step_s": STEP_S,
        "capacity": {"max_num_seqs": NUM_SEQS},
        "scheduler": {"max_queue": arguments.max_queue, "max_queue_wait_s": arguments.max_queue_wait},
        "server": {"log_level": "warning"},
    }
    with tempfile.TemporaryDirectory() as folder, FakeServer(Path(folder) / "log", **options) as process:
        found = trio.run(measure, process, arguments.seconds)
    print("\n".join(found) or "as promised")
    sys.exit(bool(found))
