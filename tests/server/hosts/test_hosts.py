"""The same application under hypercorn on trio and asyncio, anycorn on both, and uvicorn: answers, errors, disconnects,
many streams at once, its lifespan, and the death of its engine."""

import json
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import trio
from guard_client import H2Peer
from host_names import HOSTS

pytestmark = pytest.mark.e2e

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def body(n: int = 0, **changes) -> dict:
    messages = [{"role": "user", "content": f"question {n}"}]
    return {"model": "M", "messages": messages, "max_tokens": 20, "ignore_eos": True} | changes


def post(host, content: dict, path: str = CHAT, **options) -> httpx.Response:
    return httpx.post(host.url + path, json=content, timeout=60, trust_env=False, **options)


def text_of(stream: str) -> str:
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def test_answers(host) -> None:
    """A stream's pieces are the whole answer's text."""
    whole = post(host, body())
    assert whole.status_code == 200 and whole.json()["usage"]["completion_tokens"] == 20
    stream = post(host, body(stream=True))
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text.rstrip().endswith("data: [DONE]")
    assert text_of(stream.text) == whole.json()["choices"][0]["message"]["content"]
    assert host.get("/v1/models").json()["data"][0]["id"] == "M"


REFUSED = {
    "no such route": (404, "not_found", lambda h: h.get("/v1/nothing")),
    "no such model": (404, "model_not_found", lambda h: post(h, body(model="other"))),
    "wrong method": (405, "method_not_allowed", lambda h: h.get(CHAT)),
    "wrong type": (415, None, lambda h: httpx.post(h.url + CHAT, content=b"{}", trust_env=False)),
    "no JSON": (
        400,
        None,
        lambda h: httpx.post(h.url + CHAT, content=b"{", headers={"content-type": "application/json"}, trust_env=False),
    ),
    "bad value": (400, None, lambda h: post(h, body(temperature=-1))),
    "too long for the model": (
        400,
        "context_length_exceeded",
        lambda h: post(h, body(messages=[{"role": "user", "content": "x" * 50_000}])),
    ),
    "too large": (
        413,
        "request_too_large",
        lambda h: post(h, body(messages=[{"role": "user", "content": "x" * 200_000}])),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_error_statuses(host, name: str) -> None:
    status, code, ask = REFUSED[name]
    answer = ask(host)
    assert answer.status_code == status, answer.text
    assert code in (None, answer.json()["error"]["code"])
    assert post(host, body(max_tokens=1)).status_code == 200


def test_many_streams_at_once(host) -> None:
    """32 at a time, 8 of which are computed together; each gets what it gets alone."""
    alone = {n: post(host, body(n, stream=True)).text for n in range(2)}
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda n: post(host, body(n % 2, stream=True)).text, range(40)))
    for n, answer in enumerate(answers):
        assert text_of(answer) == text_of(alone[n % 2]) and answer.rstrip().endswith("[DONE]")
    host.wait_for(host.is_idle)


def leave(host, how: str) -> None:
    content = json.dumps(body(stream=how != "whole", max_tokens=16000)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(host.url.rpartition(":")[2])), timeout=30) as sock:
        if how == "half a body":
            sock.sendall(head.encode() + content[:20])
            return
        sock.sendall(head.encode() + content)
        if how not in ("at once", "whole"):
            seen = b""
            while b"data:" not in seen:
                seen += sock.recv(4096)
        if how == "whole":
            time.sleep(0.1)
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("how", ["finish", "reset", "at once", "whole", "half a body"])
def test_blocks_come_back_when_clients_leave(host, how: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: leave(host, how), range(12)))
    host.wait_for(host.is_idle, 20)
    assert post(host, body(max_tokens=1)).status_code == 200


def test_http2_streams(host) -> None:
    """Where the host speaks HTTP/2: streams side by side, one of which is reset, and then the others."""
    if host.name == "uvicorn":
        pytest.skip("uvicorn speaks HTTP/1.1 only")
    trio.run(_http2_streams, int(host.url.rpartition(":")[2]))
    host.wait_for(host.is_idle, 20)


async def _http2_streams(port: int) -> None:
    peer = await H2Peer.connect(port)
    endless = [_begin(peer, n, 16000) for n in range(3)]
    short = [_begin(peer, n, 20) for n in range(3)]
    await peer.flush()
    assert await peer.over(*short, seconds=60) and all(peer.streams[s].ended for s in short)
    assert await peer.pump(lambda: all(b"data:" in peer.streams[s].data for s in endless), 60)
    await peer.cancel(endless[0])
    last = _begin(peer, 4, 20)
    await peer.flush()
    assert await peer.over(last, seconds=60) and peer.streams[last].ended
    assert not peer.streams[endless[1]].over
    await peer.cancel(*endless[1:])
    await peer.pump(lambda: False, 0.1)
    await peer.finish()


def _begin(peer: H2Peer, n: int, max_tokens: int) -> int:
    stream = peer.begin(CHAT, method="POST", end=False, headers=[("content-type", "application/json")])
    peer.h2.send_data(stream, json.dumps(body(n, stream=True, max_tokens=max_tokens)).encode(), end_stream=True)
    return stream


@pytest.mark.parametrize("name", HOSTS)
def test_lifespan_and_engine_death(start, name: str) -> None:
    """The engine fails: each open request gets one error, health is red, the host goes on, and ends when it is told."""
    host = start(name, step_s=0.005, fail_at_step=100)
    host.wait_for(host.is_ready)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda n: post(host, body(n, stream=n % 2 == 0, max_tokens=16000)), range(6)))
    assert all("engine_dead" in answer.text for answer in answers)
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert host.get("/health").status_code == 503 and host.get("/ready").status_code == 503
    assert post(host, body()).status_code == 503
    check_end(host)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTS)
def test_start_that_fails(start, name: str) -> None:
    """An engine that cannot be opened ends the start, with its reason."""
    host = start(name, load="refused")
    host.wait_for(lambda: host._process.poll() is not None)
    host._reader.join(5)
    assert "no model is in the folder" in host.output


def check_end(host) -> None:
    """SIGTERM closes the engine, and no thread of ours is left; uvicorn ends itself with the signal."""
    code = host.stop()
    assert "engine closed" in host.output, host.output
    if host.name == "uvicorn":
        assert code in (0, -signal.SIGTERM)
    else:
        assert code == 0 and "ended, threads left: []" in host.output, host.output


def test_end(host) -> None:
    """Last: SIGTERM closes the engine, and nothing is left that keeps the process."""
    host.wait_for(host.is_idle)
    check_end(host)
    assert "Traceback" not in host.output and "ERROR" not in host.output, host.output
