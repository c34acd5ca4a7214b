"""Every way to leave, in every phase of a request, over real sockets: what the request held is back within one step.

The steps are released by the test, so "within one step" is counted. A second request, on the same connection where the
way out leaves that connection alive, must get its whole answer meanwhile.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import trio

sys.path.insert(0, str(Path(__file__).parent / "guard"))
from guard_client import H2Peer, Peer

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from aserve.core.errors import EngineDrainingError
from aserve.engine.engine import run_engine
from aserve.server.app import App
from aserve.server.engine_slot import EngineSlot
from aserve.server.guard import GuardConfig, GuardedServer
from aserve.server.listener import bind
from aserve.testing import FakeExecutor

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
CAPACITY = Capacity(num_blocks=256, block_size=4, max_num_seqs=8, max_batch_tokens=16, max_model_len=256)
SIBLING_PROMPT = 10
LIMIT_S = 30  # what only a hang reaches


@pytest.fixture
def anyio_backend():
    return "trio"


@dataclass(frozen=True)
class Phase:
    """How a request is brought to a moment of its life; ``steps`` are released after it was submitted."""

    fields: dict
    steps: int = 1
    sequences: int = 1
    capacity: dict | None = None


LONG = "v" * 60  # four steps of 16 tokens, one of them the sibling's
PHASES = {
    "queued": Phase({}, capacity={"max_num_seqs": 1}),
    "tokenising": Phase({"prompt": "TTT"}, steps=0, sequences=0),
    "first chunk": Phase({"prompt": LONG}),
    "later chunk": Phase({"prompt": LONG}, steps=2),
    "decode": Phase({}, steps=4),
    "preempted": Phase({"prompt": "v" * 30}, capacity={"num_blocks": 24, "max_model_len": 96}),
    "n = 4": Phase({"n": 4}, steps=4, sequences=4),
    "several prompts": Phase({"prompt": ["a", "bb", "ccc"]}, steps=4, sequences=3),
    "not streamed": Phase({"stream": False}, steps=4),
}
HTTP1, HTTP2 = ("FIN", "RST", "deadline", "drain", "cancelled by the host"), ("RST_STREAM", "connection loss", "GOAWAY")


class Cancellable:
    """A host program that may cancel the handler of a request; ``x-victim`` marks it."""

    def __init__(self, app):
        self._app = app
        self.victim = trio.CancelScope()

    async def __call__(self, scope, receive, send):
        if any(name == b"x-victim" for name, _ in scope["headers"]):
            with self.victim:
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class Gate:
    def __init__(self):
        self._permits = threading.Semaphore(0)
        self.is_open = False

    def release(self, steps):
        self._permits.release(steps)

    def __call__(self):
        while not self.is_open and not self._permits.acquire(timeout=0.02):
            pass


class Gated(FakeExecutor):
    def __init__(self, capacity, gate):
        super().__init__(capacity)
        self._gate = gate

    def wait(self):
        self._gate()
        return super().wait()


async def until(condition, what):
    with trio.move_on_after(LIMIT_S):
        while not condition():
            await trio.sleep(0.002)
        return
    raise AssertionError(f"not within {LIMIT_S} s: {what}")


class Bench:
    """The server, and what the test does to it."""

    def __init__(self, engine, app, host, gate, port):
        self.engine, self.app, self.host, self.gate, self.port = engine, app, host, gate, port
        self.encoding, self.encode_on = threading.Event(), threading.Event()
        encode = engine.tokenizer.encode

        def slow(text, **options):
            if text.startswith("T"):
                self.encoding.set()
                self.encode_on.wait(LIMIT_S)
            return encode(text, **options)

        self.slow_encode = slow

    @property
    def stats(self):
        return self.engine.stats()

    @property
    def num_unfinished(self):
        return self.engine._router.num_unfinished

    async def step(self, steps=1):
        for _ in range(steps):
            before = self.stats.num_steps
            self.gate.release(1)
            await until(lambda before=before: self.stats.num_steps > before, "a step")

    async def end_the_step_in_flight(self, *, is_anything_left):
        """Let one step end. With nobody left to run there may be none, so then only the emptiness tells."""
        if is_anything_left:
            await self.step()
            return
        self.gate.release(1)
        await until(lambda: not self.stats.num_running, "the end of the step in flight")


@asynccontextmanager
async def bench(tokenizer, capacity, monkeypatch):
    gate = Gate()
    sock = bind("127.0.0.1", 0, user_timeout_s=30)
    port = sock.getsockname()[1]
    config = EngineConfig(model=ModelConfig(model="M"), scheduler=SchedulerConfig())
    async with run_engine(
        executor_factory=partial(Gated, capacity, gate), tokenizer=tokenizer, config=config, model_names=("M",)
    ) as engine:
        app = App(EngineSlot(engine), ServerConfig())
        host = Cancellable(app)
        server = GuardedServer(host, GuardConfig.from_server(ServerConfig()), sock)
        made = Bench(engine, app, host, gate, port)
        monkeypatch.setattr(engine.tokenizer, "encode", made.slow_encode)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run)
                yield made
                nursery.cancel_scope.cancel()
        finally:
            gate.is_open = True
            made.encode_on.set()


def payload(**fields):
    body = {"model": "M", "prompt": "vvvvv", "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
    return json.dumps(body | fields).encode()


async def post(peer, content, **headers):
    """Send a request on a connection of either kind; the number of its stream over HTTP/2."""
    named = {"content-type": "application/json", **headers}
    if isinstance(peer, H2Peer):
        stream = peer.begin(COMPLETIONS, method="POST", end=False, headers=list(named.items()))
        peer.h2.send_data(stream, content, end_stream=True)
        await peer.flush()
        return stream
    named |= {"content-length": str(len(content)), "host": "x"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    await peer.send(f"POST {COMPLETIONS} HTTP/1.1\r\n{lines}\r\n".encode() + content)
    return None


async def leave(way, peer, stream, made):
    match way:
        case "FIN" | "connection loss":
            await peer.finish()
        case "RST":
            await peer.reset()
        case "RST_STREAM":
            await peer.cancel(stream)
        case "GOAWAY":
            peer.h2.close_connection()
            await peer.flush()
            await peer.finish()
        case "drain":
            made.engine.start_draining()
            made.engine.close_all(lambda: EngineDrainingError("the server is shutting down"))
        case "cancelled by the host":
            made.host.victim.cancel()
        case "deadline":
            pass  # it comes by itself


async def bring_to(phase, name, made, peer, **headers):
    stream = await post(peer, payload(**phase.fields), **{"x-victim": "1", **headers})
    if name == "tokenising":
        await until(made.encoding.is_set, "the encoding of the prompt")
        return stream
    await until(lambda: made.num_unfinished == 1 + phase.sequences, "submission")
    if name == "preempted":
        for _ in range(100):
            if made.stats.num_preemptions:
                break
            await made.step()
        assert made.stats.num_preemptions == 1
    else:
        await made.step(phase.steps)
    return stream


def blocks_of_the_sibling(made):
    """At most what its prompt, its tokens so far and one more need."""
    return -(-(SIBLING_PROMPT + made.stats.num_steps + 2) // CAPACITY.block_size)


@pytest.mark.parametrize("way", [*HTTP1, *HTTP2])
@pytest.mark.parametrize("name", PHASES)
async def test_what_a_request_held_is_back_within_one_step(tokenizer, monkeypatch, caplog, name, way):
    caplog.set_level(logging.INFO)
    phase = PHASES[name]
    capacity = replace(CAPACITY, **(phase.capacity or {}))
    async with bench(tokenizer, capacity, monkeypatch) as made:
        peer = await (H2Peer if way in HTTP2 else Peer).connect(made.port)
        mates = await (H2Peer.connect(made.port) if way != "RST_STREAM" else _same(peer))
        sibling = await post(mates, payload(prompt="s" * SIBLING_PROMPT))
        await until(lambda: made.num_unfinished == 1, "the sibling's submission")
        headers = {"x-request-timeout": "2"} if way == "deadline" and name != "preempted" else {}
        if way == "deadline" and name == "preempted":
            headers = {"x-request-timeout": "6"}  # it has to get there first
        stream = await bring_to(phase, name, made, peer, **headers)

        await leave(way, peer, stream, made)
        if name == "tokenising":
            made.encode_on.set()
        left = 0 if way == "drain" else 1
        await until(lambda: made.num_unfinished == left, "the request's leaving")
        await until(lambda: made.app.counts.num_active <= 1, "the end of its handler")
        await made.end_the_step_in_flight(is_anything_left=bool(left))
        stats = made.stats
        assert stats.num_running == left
        assert stats.num_waiting == 0
        assert stats.num_used_blocks <= blocks_of_the_sibling(made) * left

        made.gate.is_open = True
        if left:
            assert await mates.pump(lambda: mates.streams[sibling].ended, LIMIT_S)
            assert mates.streams[sibling].data.rstrip().endswith(b"data: [DONE]")
            assert len(text_of(mates.streams[sibling].data)) == 60
        await until(lambda: made.app.counts.num_active == 0, "quiet")
    victims = [r for r in caplog.records if r.name == "aserve.access"]
    assert len(victims) <= 2, "one line for each request"
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def text_of(data):
    events = [event[6:] for event in data.decode().split("\n\n") if event.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


async def _same(peer):
    return peer


@pytest.mark.parametrize("kind", [Peer, H2Peer])
async def test_a_close_right_after_the_end_is_a_good_end(tokenizer, monkeypatch, caplog, kind):
    caplog.set_level(logging.INFO)
    async with bench(tokenizer, CAPACITY, monkeypatch) as made:
        made.gate.is_open = True
        for _ in range(5):
            peer = await kind.connect(made.port)
            await post(peer, payload(max_tokens=3))
            assert await peer.pump(lambda peer=peer: b"[DONE]" in peer.data, LIMIT_S)
            await peer.reset()
        await until(lambda: made.app.counts.num_active == 0, "quiet")
        assert dict(made.app.counts.totals) == {(COMPLETIONS, 200, "ok"): 5}
        assert made.stats.num_requests["cancelled"] == 0
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
