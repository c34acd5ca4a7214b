"""The server over FakeExecutor, driven at ASGI level by a client that behaves as servers do."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from aserve.assembly import grammar_compiler
from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from aserve.core.pooling import Abilities
from aserve.engine.engine import run_engine
from aserve.server.app import App
from aserve.server.engine_slot import EngineSlot
from aserve.testing import FakeExecutor, write_byte_tokenizer
from aserve.text.tokenizer import Tokenizer

CAPACITY = Capacity(num_blocks=256, block_size=4, max_num_seqs=8, max_batch_tokens=64, max_model_len=512)
VECTORS_OF_8 = Abilities(size=8)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.load(folder)


class Gate:
    """Lets the step thread through one step at a time, when the test says so."""

    def __init__(self):
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def release(self, steps=1):
        self._permits.release(steps)

    def open(self):
        self._is_open = True

    def __call__(self):
        while not self._is_open and not self._permits.acquire(timeout=0.02):
            pass


class GatedExecutor(FakeExecutor):
    """Its steps are over when the gate lets them through."""

    def __init__(self, capacity, *, gate, **options):
        super().__init__(capacity, **options)
        self._gate = gate

    def wait(self):
        self._gate()
        return super().wait()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


@dataclass
class Answer:
    status: int = 0
    headers: list = field(default_factory=list)
    body: bytes = b""
    num_sends: int = 0
    complete: bool = False

    def header(self, name):
        return next((v.decode() for k, v in self.headers if k.decode().lower() == name), None)

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def data(self):
        return [b[6:] for b in self.body.decode().split("\n\n") if b.startswith("data: ")]

    @property
    def chunks(self):
        return [json.loads(d) for d in self.data if d != "[DONE]"]

    def text(self, index=0):
        parts = [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]
        return "".join(p["text"] if "text" in p else p["delta"].get("content") or "" for p in parts)

    def finish(self, index=0):
        reasons = [
            c["finish_reason"]
            for chunk in self.chunks
            for c in chunk["choices"]
            if c["index"] == index and c["finish_reason"]
        ]
        assert len(reasons) == 1
        return reasons[0]


class Exchange:
    """One request's two ends as an ASGI server has them.

    After the last part of the answer the server queues http.disconnect for the application, and only then does its
    own bookkeeping: an application that lets itself be cancelled there breaks it.
    """

    def __init__(self, body=b"", *, chunks=None, on_send=None):
        parts = [body] if chunks is None else chunks
        self._incoming = deque(
            {"type": "http.request", "body": p, "more_body": i < len(parts) - 1} for i, p in enumerate(parts)
        )
        self._news = anyio.Event()
        self._on_send = on_send
        self._sending = False
        self.answer = Answer()
        self.bookkeeping_done = False
        self.changed = anyio.Event()

    def push(self, message):
        self._incoming.append(message)
        self._news.set()

    def disconnect(self):
        self.push({"type": "http.disconnect"})

    async def receive(self):
        while not self._incoming:
            self._news = anyio.Event()
            await self._news.wait()
        await anyio.lowlevel.checkpoint()
        return self._incoming.popleft()

    async def send(self, message):
        assert not self._sending, "two sends at once"
        self._sending = True
        if self._on_send is not None:
            await self._on_send(self, message)
        answer = self.answer
        answer.num_sends += 1
        if message["type"] == "http.response.start":
            assert answer.status == 0
            answer.status, answer.headers = message["status"], list(message["headers"])
        else:
            assert answer.status
            assert not answer.complete
            answer.body += message.get("body", b"")
            if not message.get("more_body", False):
                answer.complete = True
                self.disconnect()
                for _ in range(3):
                    await anyio.lowlevel.checkpoint()
                self.bookkeeping_done = True
        self._sending = False
        self.changed.set()
        self.changed = anyio.Event()

    async def wait_for(self, condition):
        with anyio.fail_after(20):
            while not condition(self.answer):
                await self.changed.wait()


@dataclass
class Client:
    app: App
    limit_s: float = 30

    def scope(self, method, path, headers=None, **changes):
        raw = [(k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items()]
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": raw,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            **changes,
        }

    async def run(self, exchange, method, path, headers=None, **changes):
        with anyio.fail_after(self.limit_s):
            await self.app(self.scope(method, path, headers, **changes), exchange.receive, exchange.send)

    async def request(self, method, path, body=b"", headers=None, *, chunks=None, **changes):
        exchange = Exchange(body, chunks=chunks)
        await self.run(exchange, method, path, headers, **changes)
        assert exchange.answer.complete
        assert exchange.bookkeeping_done, "the application was cancelled inside its last send"
        return exchange.answer

    async def get(self, path, headers=None):
        return await self.request("GET", path, headers=headers)

    async def post(self, path, body, headers=None, **changes):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, raw, {"content-type": "application/json", **(headers or {})}, **changes)

    async def chat(self, text="hi", **fields):
        body = {"model": "M", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        return await self.post(CHAT, body)

    async def complete(self, prompt="abc", **fields):
        return await self.post(COMPLETIONS, {"model": "M", "prompt": prompt, "temperature": 0, **fields})

    async def until(self, condition):
        """Wait in real time, whatever clock the event loop has."""
        for _ in range(4000):
            if condition():
                return
            await anyio.to_thread.run_sync(time.sleep, 0.005)
        raise AssertionError("it did not come to that")

    async def submitted(self, count):
        """Wait until the engine has so many unfinished sequences."""
        await self.until(lambda: self.app.slot.engine._router.num_unfinished == count)

    async def settled(self):
        """Wait until the engine holds nothing any more."""
        engine = self.app.slot.engine
        with anyio.fail_after(10):
            await engine.wait_idle()
            while engine.stats().num_used_blocks or engine.stats().num_running:
                await anyio.sleep(0.005)


@pytest.fixture
def serving(tokenizer):
    """``async with serving(...) as client``: an engine over FakeExecutor behind the application.

    Options: those of ServerConfig in ``server``; ``max_queue``; FakeExecutor's; Capacity's.
    """

    @asynccontextmanager
    async def open_client(
        *, server=None, max_queue=100, tokenizer=tokenizer, gate=None, abilities=VECTORS_OF_8, **options
    ):
        fake = {k: options.pop(k) for k in ("next_token", "fail_at_step", "step_s") if k in options}
        config = EngineConfig(model=ModelConfig(model="fake"), scheduler=SchedulerConfig(max_queue=max_queue))
        kind = FakeExecutor if gate is None else partial(GatedExecutor, gate=gate)
        grammars = grammar_compiler(tokenizer, size=64)
        factory = partial(kind, replace(CAPACITY, **options), grammars=grammars, **fake)
        async with run_engine(
            executor_factory=factory,
            tokenizer=tokenizer,
            config=config,
            model_names=("M", "org/M2"),
            abilities=abilities,
            grammars=grammars,
        ) as engine:
            try:
                yield Client(App(EngineSlot(engine), ServerConfig(**(server or {}))))
            finally:
                if gate is not None:
                    gate.open()

    return open_client


@pytest.fixture
def make_exchange():
    return Exchange


@pytest.fixture
def idle_client():
    """A client of an application without an engine."""
    return lambda **server: Client(App(EngineSlot(), ServerConfig(**server)))
