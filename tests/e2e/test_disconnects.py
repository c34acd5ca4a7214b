"""A thousand clients that leave at random moments, over both protocols, leave nothing behind."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from typing import Any

import h2.config
import h2.connection
import h2.exceptions
import httpx

NUM_CLIENTS = 1000
NUM_THREADS = 12


def payload(rng: random.Random) -> bytes:
    """A request that streams or not, short enough to end or long enough to be left in any phase."""
    fields: dict[str, Any] = {
        "model": "M",
        "messages": [{"role": "user", "content": "x" * rng.choice([1, 40, 700, 1500])}],
        "max_tokens": rng.choice([1, 4, 30, 1000]),
        "stream": rng.random() < 0.7,
        "n": rng.choice([1, 1, 1, 3]),
        "seed": rng.randrange(1000),
    }
    return json.dumps(fields).encode()


def linger(rng: random.Random, sock: socket.socket) -> None:
    """Wait for a random moment: at once, before or after the first bytes, or after several."""
    sock.settimeout(rng.choice([0.005, 0.02, 0.1, 0.4]))
    try:
        for _ in range(rng.choice([0, 0, 1, 4, 50])):
            if not sock.recv(65536):
                return
    except OSError:
        return


def leave(rng: random.Random, sock: socket.socket) -> None:
    if rng.random() < 0.4:  # RST instead of FIN
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif rng.random() < 0.2:
        sock.shutdown(socket.SHUT_WR)
        linger(rng, sock)
    sock.close()


def visit_http1(rng: random.Random, port: int) -> None:
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    data = payload(rng)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(data) + data
    if rng.random() < 0.1:
        request = request[: rng.randrange(len(request))]
    sock.sendall(request)
    linger(rng, sock)
    leave(rng, sock)


def visit_http2(rng: random.Random, port: int) -> None:
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    streams = []
    for _ in range(rng.randint(1, 5)):
        stream = connection.get_next_available_stream_id()
        data = payload(rng)
        connection.send_headers(
            stream,
            [
                (":method", "POST"),
                (":path", "/v1/chat/completions"),
                (":scheme", "http"),
                (":authority", "x"),
                ("content-type", "application/json"),
                ("content-length", str(len(data))),
            ],
        )
        half = rng.random() < 0.1
        connection.send_data(stream, data[: len(data) // 2] if half else data, end_stream=not half)
        streams.append(stream)
    sock.sendall(connection.data_to_send())
    linger(rng, sock)
    how = rng.random()
    if how < 0.5:
        for stream in streams:
            connection.reset_stream(stream, 8)
    elif how < 0.7:
        connection.close_connection()
    try:
        sock.sendall(connection.data_to_send())
        linger(rng, sock)
    except OSError:
        pass
    leave(rng, sock)


def test_a_thousand_disconnects(start: Any) -> None:
    server = start("--max-num-seqs", "8", "--kv-cache-tokens", "6000", "--max-batch-tokens", "256", "--max-queue", "64")
    httpx.get(server.url + "/metrics", trust_env=False)
    files_before = server.num_open_files()
    problems: list[str] = []

    def run(index: int) -> None:
        rng = random.Random(index)
        for _ in range(NUM_CLIENTS // NUM_THREADS + 1):
            try:
                (visit_http1 if rng.random() < 0.5 else visit_http2)(rng, server.port)
            except (ConnectionError, TimeoutError):
                if server.process.poll() is not None:
                    problems.append(f"the server ended with {server.process.returncode}")
                    return

    threads = [threading.Thread(target=run, args=(n,)) for n in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems[0] + server.log[-3000:]
    server.wait_idle()
    end = time.monotonic() + 40
    while server.num_open_files() > files_before:
        assert time.monotonic() < end, f"{server.num_open_files()} open files, {files_before} before"
        time.sleep(0.2)
    assert " ERROR " not in server.log, server.log
    assert "Traceback" not in server.log, server.log
    reply = httpx.post(
        server.url + "/v1/completions", json={"model": "M", "prompt": "a", "max_tokens": 3}, trust_env=False, timeout=30
    )
    assert reply.status_code == 200
    assert server.stop() == 0
