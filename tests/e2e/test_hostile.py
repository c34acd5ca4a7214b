"""A whole server with a real model under attack: who behaves is answered as ever, and the server is as it was before.

The attacks one by one are in ``tests/server/guard``; what they cost others, in ``tests/server/serve/test_storm.py``.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

ATTACK = Path(__file__).parent.parent / "server" / "serve" / "attack.py"
ATTACKS = ("rapid_reset", "continuations", "pings", "settings", "bombs", "garbage", "slow_headers", "slow_bodies")


def answer(url: str, n: int) -> str:
    body = {"model": "M", "prompt": f"question {n}", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    return httpx.post(url + "/v1/completions", json=body, timeout=120, trust_env=False).json()["choices"][0]["text"]


def test_all_attacks_at_once(start: Any) -> None:
    server = start("--read-timeout-s", "2", "--max-connections", "256")
    alone = [answer(server.url, n) for n in range(4)]
    before = server.num_open_files()
    attackers = [
        subprocess.Popen([sys.executable, str(ATTACK), str(server.port), name, "10"], stderr=subprocess.DEVNULL)
        for name in ATTACKS
    ]
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.extend(answer(server.url, n % 4) for n in range(24)))
    asking.start()
    asking.join(200)
    for attacker in attackers:
        assert attacker.wait(120) == 0
    assert answers == [alone[n % 4] for n in range(24)]
    server.wait_idle()
    for _ in range(300):
        if server.num_open_files() <= before:
            break
        threading.Event().wait(0.1)
    assert server.num_open_files() <= before
    assert server.stop() == 0
    assert "Traceback" not in server.log and len(server.log) < 100_000
