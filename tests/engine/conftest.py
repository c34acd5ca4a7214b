"""An engine in parts: without a thread, where the test turns the step loop by hand, and a whole one with its thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig, ModelConfig, SchedulerConfig
from aserve.core.request import GenerationRequest, SamplingParams
from aserve.core.step import StepExecutor
from aserve.engine.admission import QueueLimits
from aserve.engine.bridge import CommandQueue, EventRouter
from aserve.engine.engine import Engine, run_engine
from aserve.engine.generation import Generation
from aserve.engine.grammars import Grammars
from aserve.engine.lifecycle import Lifecycle
from aserve.engine.local_client import LocalClient
from aserve.engine.messages import Failed, Loaded, Stop
from aserve.engine.stats import StatsRecorder
from aserve.engine.step_loop import StepLoop
from aserve.scheduler import Scheduler, check
from aserve.testing import FakeExecutor
from aserve.text.detokenizer import ByteDetokenizer

CAPACITY = Capacity(num_blocks=64, block_size=4, max_num_seqs=4, max_batch_tokens=32, max_model_len=128)
EOS = 257


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


class ByteTokenizer:
    """One token per byte, and four special ones."""

    vocab_size = 260
    stop_token_ids = (EOS,)
    generation_defaults = MappingProxyType({"temperature": 0.5})

    def __init__(self):
        self.num_encoded = 0

    def encode(self, text, *, add_special_tokens=True):
        self.num_encoded += 1
        return [256] * add_special_tokens + list(text.encode())

    def encode_chat(self, messages, **template_options):
        return self.encode("".join(m["content"] for m in messages) + template_options.get("suffix", ""))

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else b"<special>"

    def detokenizer(self, *, skip_special_tokens=True):
        special = b"" if skip_special_tokens else b"<special>"
        return ByteDetokenizer({i: bytes([i]) if i < 256 else special for i in range(260)})


def script(text: bytes | list[int], *, prompt: int) -> Callable[[list[int], int], int]:
    """A model that says this after a prompt of so many tokens, and then the end of text."""
    return lambda tokens, seed: [*text, *[EOS] * 500][len(tokens) - prompt]


class ManualEngine:
    """The parts of an engine without its thread. ``turn`` is one turn of the step loop."""

    def __init__(
        self,
        executor: StepExecutor,
        max_queue: int = 100,
        max_queue_tokens: int = 10**6,
        max_wait_s: float | None = None,
    ):
        self.recorder, self.lifecycle, self.commands = StatsRecorder(), Lifecycle(), CommandQueue()
        self.router = EventRouter(self.recorder, self.lifecycle.receive, lambda: self.commands.put(Stop()))
        self.tokenizer = ByteTokenizer()
        self.scheduler = Scheduler(executor.capacity)
        self.client = LocalClient(
            commands=self.commands,
            router=self.router,
            lifecycle=self.lifecycle,
            recorder=self.recorder,
            capacity=executor.capacity,
            vocab_size=260,
            grammars=Grammars(None, timeout_s=10.0, call_soon=self.router.call_soon),
            limits=QueueLimits(
                max_sequences_waiting=max_queue, max_tokens_waiting=max_queue_tokens, max_wait_s=max_wait_s
            ),
        )
        self.loop = StepLoop(
            self.scheduler,
            executor,
            take=lambda block: self.commands.take(block=False),
            publish=self.router.publish,
            clock=partial(next, count()),
        )
        self.router.publish(self.loop.report())
        self.router.publish(Loaded(executor.capacity))
        self.router._deliver()
        self._ids = count()

    def request(self, prompt: bytes = b"abc", max_tokens: int = 8, *, sampling=None, **fields) -> GenerationRequest:
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(EOS,), **(sampling or {}))
        return GenerationRequest(
            request_id=f"r{next(self._ids)}", prompt_token_ids=tuple(prompt), sampling=sampling, **fields
        )

    def generate(self, *args, **kwargs) -> Generation:
        request = args[0] if args and isinstance(args[0], GenerationRequest) else self.request(*args, **kwargs)
        return Generation(request, client=self.client, tokenizer=self.tokenizer, recorder=self.recorder)

    def turn(self, times: int = 1):
        for _ in range(times):
            assert self.loop.turn()

    async def step(self, times: int = 1):
        """Turns, with what they publish delivered."""
        for _ in range(times):
            self.turn()
            await deliver()

    def fail(self, error: BaseException):
        self.router.publish(Failed(error))

    async def assert_nothing_left(self):
        for _ in range(4):
            await self.step()
        assert self.router.num_unfinished == 0
        assert not self.scheduler.has_work
        assert self.scheduler.stats().num_used_blocks == 0
        assert self.client.is_idle
        check(self.scheduler)


async def deliver():
    """Let scheduled callbacks, and the tasks that they wake, run."""
    for _ in range(4):
        await checkpoint()


@pytest.fixture
def deliver_all():
    return deliver


@pytest.fixture
def make_script():
    return script


@pytest.fixture
def capacity():
    return CAPACITY


@pytest.fixture
def manual():
    """Call within the event loop: ``manual(next_token=..., max_queue=..., **capacity)``."""

    def make(*, max_queue=100, max_queue_tokens=10**6, max_wait_s=None, executor=None, **options):
        fake = {k: options.pop(k) for k in ("next_token", "fail_at_step") if k in options}
        return ManualEngine(
            executor or FakeExecutor(replace(CAPACITY, **options), **fake), max_queue, max_queue_tokens, max_wait_s
        )

    return make


@pytest.fixture
def running():
    """``async with running(...) as engine``: with a thread, over FakeExecutor or a given factory."""

    @asynccontextmanager
    async def open_engine(*, factory=None, max_queue=100, join_timeout_s=5.0, **options):
        fake = {k: options.pop(k) for k in ("next_token", "fail_at_step", "step_s") if k in options}
        config = EngineConfig(model=ModelConfig(model="fake"), scheduler=SchedulerConfig(max_queue=max_queue))
        factory = factory or partial(FakeExecutor, replace(CAPACITY, **options), **fake)
        tokenizer: Any = ByteTokenizer()
        async with run_engine(
            executor_factory=factory,
            tokenizer=tokenizer,
            config=config,
            model_names=("fake",),
            join_timeout_s=join_timeout_s,
        ) as engine:
            yield engine

    return open_engine


@pytest.fixture
def request_to():
    """``request_to(engine, b"prompt", max_tokens, **fields)``"""

    def make(engine: Engine, prompt: bytes = b"abc", max_tokens: int = 8, *, sampling=None, **fields):
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(EOS,), **(sampling or {}))
        return GenerationRequest(
            request_id=engine.new_request_id(), prompt_token_ids=tuple(prompt), sampling=params, **fields
        )

    return make


@pytest.fixture
def within():
    """A limit that only a hang reaches."""
    return partial(anyio.fail_after, 60)
