"""A program that gives up on an engine while its executor loads, and ends: it must not take the process down."""

from __future__ import annotations

import sys
import time
from functools import partial

import anyio

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig, ModelConfig
from aserve.engine.engine import run_engine
from aserve.testing import FakeExecutor


def load(capacity: Capacity) -> FakeExecutor:
    time.sleep(1.0)
    print("loaded", flush=True)
    return FakeExecutor(capacity)


async def main() -> None:
    capacity = Capacity(num_blocks=8, block_size=4, max_num_seqs=2, max_batch_tokens=8, max_model_len=32)
    with anyio.move_on_after(0.1):
        async with run_engine(
            executor_factory=partial(load, capacity),
            tokenizer=None,  # type: ignore[arg-type]  # never reached
            config=EngineConfig(model=ModelConfig(model="fake")),
            model_names=("fake",),
        ):
            raise AssertionError("loading was not cancelled")
    print("given up", flush=True)


anyio.run(main, backend=sys.argv[1])
