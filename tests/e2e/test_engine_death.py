"""The step thread fails: every request, running or queued, gets one error at once, and the process says so."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx

SCRIPT = str(Path(__file__).with_name("serve_with_fault.py"))
NUM_REQUESTS = 50
TOGETHER_S = 5.0
"""Only somebody who waits for a limit of its own to pass comes later than this after the others."""


def test_a_fault_in_the_step_thread(start: Any) -> None:
    server = start("--max-num-seqs", "16", command=(SCRIPT, "400"))
    answers: dict[int, tuple[int, str]] = {}
    ends: list[float] = []

    def ask(n: int) -> None:
        body = {"model": "M", "prompt": f"request {n}", "max_tokens": 3000, "stream": n % 2 == 0, "ignore_eos": True}
        reply = httpx.post(server.url + "/v1/completions", json=body, timeout=120, trust_env=False)
        ends.append(time.monotonic())
        answers[n] = (reply.status_code, reply.text)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(NUM_REQUESTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == NUM_REQUESTS
    assert max(ends) - min(ends) < TOGETHER_S
    for n, (status, text) in answers.items():
        assert text.count('"error"') == 1, f"request {n}: {status} {text[-300:]}"
        assert "engine_dead" in text
        assert status == (200 if text.startswith(("data:", ":")) else 503)
        assert "[DONE]" not in text
        assert "injected" not in text, "internals in an answer"
    assert server.process.wait(30) not in (0, None)
    assert "injected device failure" in server.log.splitlines()[-1], server.log[-2000:]
