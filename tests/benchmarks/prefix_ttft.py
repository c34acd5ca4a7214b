"""Time to first token with the prefix cache and without it, when many requests share a long system prompt.

    python tests/benchmarks/prefix_ttft.py [--model smollm2-135m] [--shared 4000] [--requests 64] [--concurrency 1]

Each round starts one server with the prefix cache off and one with it on, in turn. One request with the shared prompt
and another question comes first (it fills the cache, where there is one) and is not counted; then the requests, from
``--concurrency`` clients, each of which asks its next question when it has its answer. Prompts are token ids, so their
lengths are exact. Prints the mean time to first token of each and their ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import httpx


def first_token_s(client: httpx.Client, body: dict[str, Any]) -> float:
    """Seconds from sending a request to its first token; the answer is read to its end."""
    started = time.perf_counter()
    first = 0.0
    with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{reply.status_code}: {reply.read().decode()[:300]}")
        for line in reply.iter_lines():
            if line.startswith("data: {") and not first:
                choices = json.loads(line[6:]).get("choices", [])
                first = time.perf_counter() - started if choices else 0.0
    return first


def bodies(args: argparse.Namespace, rng: random.Random) -> list[dict[str, Any]]:
    """The requests: one shared beginning, questions of their own."""
    ids = range(1000, 20_000)
    shared = rng.choices(ids, k=args.shared)
    return [
        {
            "model": args.model,
            "prompt": shared + rng.choices(ids, k=args.question),
            "max_tokens": args.max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        for _ in range(args.requests + 1)
    ]


def load(url: str, requests: list[dict[str, Any]], concurrency: int) -> list[float]:
    """Times to first token of all requests but the first, which goes ahead."""
    times: list[float] = []
    lock = threading.Lock()
    with httpx.Client(base_url=url, timeout=1800, trust_env=False) as client:
        first_token_s(client, requests[0])
        todo = requests[:0:-1]

        def work() -> None:
            while True:
                with lock:
                    if not todo:
                        return
                    body = todo.pop()
                taken = first_token_s(client, body)
                with lock:
                    times.append(taken)

        threads = [threading.Thread(target=work) for _ in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return times


def serve(args: argparse.Namespace, flag: str, requests: list[dict[str, Any]]) -> list[float]:
    """Start a server, send it the load, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "aserve", "serve", args.model, "--port", str(port), flag, *shlex.split(args.flags)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the server ended before it was ready: {shlex.join(command)}")
            try:
                if httpx.get(url + "/health", timeout=5, trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        return load(url, requests, args.concurrency)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shared", type=int, default=4000, help="tokens of the shared beginning")
    parser.add_argument("--question", type=int, default=32, help="tokens of each request's own")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", default="", help="more flags of the server")
    args = parser.parse_args()
    ratios: list[float] = []
    for number in range(args.rounds):
        requests = bodies(args, random.Random(args.seed + number))
        means: list[float] = []
        for flag in ("--no-prefix-cache", "--prefix-cache"):
            times = serve(args, flag, requests)
            means.append(statistics.mean(times))
            print(
                f"round {number + 1} {flag:17} TTFT mean {means[-1] * 1e3:8.1f} ms, median "
                f"{statistics.median(times) * 1e3:8.1f} ms, most {max(times) * 1e3:8.1f} ms of {len(times)}",
                flush=True,
            )
        ratios.append(means[0] / means[1])
    print(f"off / on: {', '.join(f'{ratio:.1f}' for ratio in ratios)}; median {statistics.median(ratios):.1f}")


if __name__ == "__main__":
    main()
