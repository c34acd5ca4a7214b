"""``run_server`` with an engine that has a double for its executor. Run as a program; options as JSON."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import tokenizers

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from aserve.core.errors import ModelLoadError
from aserve.core.memory import MemoryUse
from aserve.engine.engine import Engine, run_engine
from aserve.server import serve
from aserve.testing import CHAT_TEMPLATE, EOS, FakeExecutor, write_byte_tokenizer
from aserve.text.chat_template import ChatTemplate
from aserve.text.settings import read_settings
from aserve.text.tokenizer import Tokenizer

OPTIONS = json.loads(sys.argv[1])
CAPACITY = Capacity(
    num_blocks=2000,
    block_size=16,
    max_num_seqs=8,
    max_batch_tokens=512,
    max_model_len=16384,
    memory=MemoryUse(device="a GPU", on_gpu=True, total=2**30, others=0, weights=2**29, activations=0, kv_cache=2**28),
)


class Stuck(FakeExecutor):
    """Hangs in a step, as a driver call can."""

    def wait(self):
        time.sleep(3600)


def executor() -> FakeExecutor:
    how = OPTIONS.get("load", "well")
    if how == "refused":
        raise ModelLoadError("no model is in the folder: there is no config.json")
    if how == "crash":
        raise ZeroDivisionError("a fault of ours")
    if how == "slow":
        time.sleep(3600)
    kind = Stuck if how == "stuck" else FakeExecutor
    capacity = replace(CAPACITY, **OPTIONS.get("capacity", {}))
    return kind(capacity, step_s=OPTIONS.get("step_s", 0.005), fail_at_step=OPTIONS.get("fail_at_step"))


@asynccontextmanager
async def open_engine(config: EngineConfig) -> AsyncIterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder))
        rust = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
        # what transformers would wrap it in; importing that takes longer than the rest of the start
        backend = SimpleNamespace(backend_tokenizer=rust, eos_token_id=EOS)
        tokenizer = Tokenizer(backend, read_settings(Path(folder)), ChatTemplate(CHAT_TEMPLATE, {}))
    async with run_engine(
        executor_factory=executor, tokenizer=tokenizer, config=config, model_names=("M",), join_timeout_s=1
    ) as engine:
        yield engine


def jump(_: int, __: object) -> None:
    """Set the wall clock a day ahead, or back."""
    if time.time is REAL_TIME:
        time.time = lambda: REAL_TIME() + 86400
    else:
        time.time = REAL_TIME


def hang(_: int, __: object) -> None:
    """The event loop's thread does not come back."""
    while True:
        time.sleep(0.1)


REAL_TIME = time.time

if __name__ == "__main__":
    serve.STOP_LIMIT_S = OPTIONS.get("stop_limit_s", serve.STOP_LIMIT_S)
    if OPTIONS.get("hangs"):
        signal.signal(signal.SIGUSR1, hang)
    if OPTIONS.get("clock_jumps"):
        signal.signal(signal.SIGUSR1, jump)
    server = ServerConfig(**{"port": 0, **OPTIONS.get("server", {})})
    settings = EngineConfig(model=ModelConfig(model="M"), scheduler=SchedulerConfig(**OPTIONS.get("scheduler", {})))
    sys.exit(serve.run_server(settings, server, open_engine=open_engine))
