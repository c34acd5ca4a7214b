"""Attacks from another process, while a client measures how long its first tokens take: with and without, in turns."""

import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attack import ATTACKS
from serve_clients import chat_request, get

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = 6
ROUND_S = 2.0
MOST_MB = 64


def memory_mb(pid: int, what: str) -> float:
    return int(re.search(rf"{what}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def first_tokens(port: int, seconds: float) -> tuple[float, list[float]]:
    """Seconds to the first token on a new connection, and then on it, of one short stream after another."""
    times = []
    end = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        while (began := time.monotonic()) < end:
            sock.sendall(chat_request(5))
            data = sock.recv(65536)
            while b"data:" not in data:
                data += sock.recv(65536)
            times.append(time.monotonic() - began)
            while not data.endswith(b"0\r\n\r\n"):
                data += sock.recv(65536)
    return times[0], times[1:]


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


@pytest.mark.parametrize("name", ATTACKS)
def test_others_are_served(start, name: str, record_property, capsys) -> None:
    process = start(step_s=0.005, server={"read_timeout_s": 5.0, "max_connections": 512})
    port = process.ready()
    first_tokens(port, 2)
    before, calm, stormy, entering = memory_mb(process.pid, "VmRSS"), [], [], []
    for _ in range(ROUNDS):
        calm += first_tokens(port, ROUND_S)[1]
        command = [sys.executable, str(Path(__file__).parent / "attack.py"), str(port), name, str(ROUND_S + 1)]
        with subprocess.Popen(command) as attacker:
            time.sleep(1)
            first, others = first_tokens(port, ROUND_S)
            entering.append(first)
            stormy += others
            assert attacker.wait(60) == 0
    grown = memory_mb(process.pid, "VmHWM") - before
    with capsys.disabled():
        print(
            f"\n{name}: p50 {statistics.median(calm) * 1e3:.1f} -> {statistics.median(stormy) * 1e3:.1f} ms, "
            f"p99 {p99(calm) * 1e3:.1f} -> {p99(stormy) * 1e3:.1f} ms ({p99(stormy) / p99(calm):.2f}x) "
            f"of {len(calm)} and {len(stormy)}; on a new connection {max(entering) * 1e3:.0f} ms at most; "
            f"memory +{grown:.1f} MB"
        )
    assert grown < MOST_MB
    assert get(port, "/health").status_code == 200
    process.signal()
    assert process.wait() == 0
    assert "Traceback" not in process.output
    assert p99(stormy) <= 2 * max(p99(calm), 3 * statistics.median(calm))  # a quiet machine's p99 is near its median
