"""What happens to the process from outside: a log that cannot be written, a stop, a clock that is set, a kill."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from serve_clients import CHAT, body, get, post, raw_stream, rest_of

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(port: int) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            if get(port, "/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end
        time.sleep(0.05)


def many_lines(port: int) -> None:
    """Requests that are worth 200 KB of log."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        request = b"GET /v1/models/%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 110)
        for _ in range(20):
            sock.sendall(request * 50)
            answers = b""
            while answers.count(b"HTTP/1.1 404") < 50:
                answers += sock.recv(65536)


@pytest.mark.parametrize("how", ["full disk", "closed pipe", "pipe that nobody reads", "no stderr"])
def test_log_that_cannot_be_written(how: str) -> None:
    """Lines are lost, and nothing else: requests are answered, and the process ends with 0."""
    port = free_port()
    options = f'{{"server": {{"port": {port}, "log_level": "debug"}}}}'
    command = [sys.executable, str(HERE / "serve_process.py"), options]
    reading, writing = os.pipe()
    if how == "no stderr":
        command = ["sh", "-c", 'exec "$0" "$@" 2>&-', *command]
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=full if how == "full disk" else writing)
    os.close(writing)
    if how == "closed pipe":
        os.close(reading)
    try:
        wait_ready(port)
        if how == "pipe that nobody reads":
            many_lines(port)
        assert "[DONE]" in post(port, 5).text
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        if how != "closed pipe":
            os.close(reading)


def test_stopped_and_continued(start) -> None:
    """SIGSTOP for longer than all of its limits: the time does not count, and whoever waited is served."""
    limits = dict.fromkeys(("request_timeout_s", "read_timeout_s", "stall_timeout_s", "watchdog_s"), 6)
    process = start(step_s=0.01, server=limits)
    port = process.ready()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHo")
        sock = raw_stream(port, 100)
        stop_for(process, 8)
        assert b"[DONE]" in rest_of_stream(sock)
        slow.sendall(b"st: x\r\nConnection: close\r\n\r\n")
        assert b"200" in slow.recv(1000)
    assert "no step has completed" not in process.output
    process.signal()
    assert process.wait() == 0


def test_stopped_and_continued_while_it_drains(start) -> None:
    """Neither the drain's time nor that of the last resort behind it has passed: the stream gets its rest."""
    process = start(step_s=0.01, server={"drain_timeout_s": 5}, stop_limit_s=0.0)
    sock = raw_stream(process.ready(), 100)
    process.signal()
    process.says("no new requests")
    stop_for(process, 10)
    assert b"[DONE]" in rest_of_stream(sock)
    assert process.wait() == 0


def test_stop_that_hangs_is_ended(start) -> None:
    process = start(step_s=0.01, server={"drain_timeout_s": 0.3}, stop_limit_s=0.0, hangs=True)
    sock = raw_stream(process.ready(), 16000)
    process.signal()
    process.says("no new requests")
    process.signal(signal.SIGUSR1)
    assert process.wait(60) == 1
    assert "did not end in time" in process.output
    sock.close()


def stop_for(process, seconds: float) -> None:
    process.signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.signal(signal.SIGCONT)


def rest_of_stream(sock: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"0\r\n\r\n") and (part := sock.recv(65536)):
        data += part
    sock.close()
    return data


def test_clock_that_is_set(start) -> None:
    """A wall clock that jumps a day ahead and back means nothing to limits, streams or health."""
    process = start(step_s=0.01, server={"request_timeout_s": 60}, clock_jumps=True)
    sock = raw_stream(process.ready(), 120)
    for _ in range(2):
        process.signal(signal.SIGUSR1)
        time.sleep(0.2)
        assert get(process.port, "/health").status_code == 200
    assert b"[DONE]" in rest_of_stream(sock)
    assert "[DONE]" in post(process.port, 5).text
    process.signal()
    assert process.wait() == 0


def test_killed(start) -> None:
    """SIGKILL: clients see the end of their streams at once, and the port is free for the next server."""
    process = start(step_s=0.01)
    port = process.ready()
    sock = raw_stream(port, 16000)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    try:
        data = rest_of(sock)
    except ConnectionResetError:
        data = b""
    assert b"[DONE]" not in data
    other = start(server={"port": port})
    assert other.ready() == port and "[DONE]" in post(port, 5).text


def test_hangup_without_tls_ends_the_server(start) -> None:
    """A terminal that is closed; running requests have their time, as with SIGTERM."""
    process = start(step_s=0.01)
    sock = raw_stream(process.ready(), 50)
    process.signal(signal.SIGHUP)
    assert b"[DONE]" in rest_of(sock)
    assert process.wait() == 0 and "SIGHUP: no new requests" in process.output


def test_refused_keys_do_not_fill_the_log(start) -> None:
    """An uploader without a key, over and over: bounded lines, all counted."""
    process = start(server={"api_key": ["k"], "max_body_bytes": 1000})
    port = process.ready()
    with httpx.Client(trust_env=False) as client:
        for _ in range(150):
            assert client.post(f"http://127.0.0.1:{port}{CHAT}", json=body(5)).status_code == 401
    metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": "Bearer k"}, trust_env=False).text
    assert 'status="401"' in metrics and " 150.0" in metrics
    assert 0 < process.output.count(" 401 ") <= 60
    process.signal()
    assert process.wait() == 0
