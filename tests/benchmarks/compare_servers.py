"""Output tokens per second of two OpenAI-compatible servers, measured in turn on one machine.

    python tests/benchmarks/compare_servers.py \\
        --a 'aserve serve smollm2-135m --port {port}' --a-model smollm2-135m \\
        --b 'transformers serve MODEL_FOLDER --port {port} --device cpu --dtype bfloat16 --continuous-batching' \\
        --b-model MODEL_FOLDER --concurrency 8 --requests 16

Each round starts one server, sends it a warm-up request and then the load, and stops it: A B A B ..., so that a
machine whose speed drifts slows both. Prompts differ between rounds and requests, so no prefix is found in a cache.
Tokens are counted as the server reports them, or as stream events where it does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import signal
import socket
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

WORDS = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split()


@dataclass
class Run:
    """One server's load in one round; times in seconds."""

    ready_s: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def prompt(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def stream(url: str, body: dict[str, Any], run: Run, lock: threading.Lock) -> None:
    started = time.perf_counter()
    times: list[float] = []
    usage = 0
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=600, trust_env=False) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{reply.status_code}: {reply.read().decode()[:300]}")
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                usage = chunk["usage"]["completion_tokens"]
            if any((c.get("delta") or {}).get("content") for c in chunk.get("choices", [])):
                times.append(time.perf_counter())
    ended = time.perf_counter()
    with lock:
        run.tokens += usage or len(times)
        run.first.append((times[0] if times else ended) - started)  # an answer may be empty
        run.gaps += [b - a for a, b in itertools.pairwise(times)]


def load(url: str, model: str, args: argparse.Namespace, rng: random.Random, run: Run) -> None:
    extra = json.loads(args.fields)

    def body(max_tokens: int) -> dict[str, Any]:
        text = prompt(rng, args.prompt_words)
        messages = [{"role": "user", "content": text}]
        return {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True, **extra}

    lock = threading.Lock()
    stream(url, body(4), Run(), lock)
    bodies = [body(args.max_tokens) for _ in range(args.requests)]
    started = time.perf_counter()

    def work() -> None:
        while True:
            with lock:
                if not bodies:
                    return
                mine = bodies.pop()
            stream(url, mine, run, lock)

    threads = [threading.Thread(target=work) for _ in range(args.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.seconds = time.perf_counter() - started


def measure(command: str, model: str, args: argparse.Namespace, rng: random.Random) -> Run:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, run, started = f"http://127.0.0.1:{port}", Run(), time.perf_counter()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(shlex.split(command.replace("{port}", str(port))), **quiet)
    try:
        while True:
            try:
                if httpx.get(url + "/health", timeout=5, trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None:
                raise SystemExit(f"ended before it was ready: {command}")
            time.sleep(0.05)
        run.ready_s = time.perf_counter() - started
        load(url, model, args, rng, run)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for side in "ab":
        parser.add_argument(f"--{side}", required=True, help="command; {port} stands for the port")
        parser.add_argument(f"--{side}-model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-words", type=int, default=95, help="about 128 tokens with SmolLM2's chat template")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--fields", default='{"temperature": 0}', help="JSON added to each request")
    args = parser.parse_args()
    rng = random.Random(time.time_ns())
    rates: dict[str, list[float]] = {"a": [], "b": []}
    for number in range(args.rounds):
        for side in "ab":
            run = measure(getattr(args, side), getattr(args, f"{side}_model"), args, rng)
            rates[side].append(run.tokens / run.seconds)
            gap = f"{statistics.median(run.gaps) * 1e3:6.1f}" if run.gaps else "     -"
            print(
                f"round {number + 1} {side}: {rates[side][-1]:7.1f} tok/s, {run.tokens} tokens, TTFT median "
                f"{statistics.median(run.first) * 1e3:7.1f} ms, gap median {gap} ms, ready {run.ready_s:.1f} s",
                flush=True,
            )
    ratios = [a / b for a, b in zip(rates["a"], rates["b"], strict=True)]
    print(
        f"a/b per round: {', '.join(f'{r:.2f}' for r in ratios)}; median {statistics.median(ratios):.2f}, "
        f"least {min(ratios):.2f}, most {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
