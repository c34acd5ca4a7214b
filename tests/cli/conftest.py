"""Commands on an engine without a model."""

from contextlib import asynccontextmanager

import pytest

from aserve.core.capacity import Capacity
from aserve.engine.engine import run_engine
from aserve.testing import FakeExecutor, write_byte_tokenizer
from aserve.text.tokenizer import Tokenizer

CAPACITY = Capacity(num_blocks=64, block_size=16, max_num_seqs=4, max_batch_tokens=64, max_model_len=256)


@pytest.fixture
def executor():
    """The executor of the next command; its options may be changed before the command runs."""
    return FakeExecutor(CAPACITY)


@pytest.fixture
def fake_engine(monkeypatch, tmp_path, executor):
    """Commands that open an engine get one whose model is ``executor``."""
    write_byte_tokenizer(tmp_path / "tokenizer")

    @asynccontextmanager
    async def open_engine(config, **_):
        tokenizer = Tokenizer.load(tmp_path / "tokenizer")
        async with run_engine(
            executor_factory=lambda: executor, tokenizer=tokenizer, config=config, model_names=("M",)
        ) as engine:
            yield engine

    monkeypatch.setattr("aserve.cli.launch.engine_opener", lambda **_: open_engine)
