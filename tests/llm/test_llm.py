"""The blocking interface: batches, errors in their place, several threads, and an end that leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig, ModelConfig
from aserve.core.errors import AserveError, ConfigError, ContextLengthError, InvalidRequestError
from aserve.core.pooling import PoolingKind, PoolingParams
from aserve.engine.engine import run_engine
from aserve.llm import LLM, answer_all
from aserve.testing import FakeExecutor, fake_vector, write_byte_tokenizer
from aserve.text.tokenizer import Tokenizer

CAPACITY = Capacity(num_blocks=64, block_size=16, max_num_seqs=4, max_batch_tokens=64, max_model_len=256)


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """The configurations that engines were opened with; each engine's model is a fake."""
    write_byte_tokenizer(tmp_path / "tokenizer")
    configs = []

    @asynccontextmanager
    async def open_engine(config, **_):
        configs.append(config)
        if config.model.model == "missing":
            raise ConfigError("there is no such model")
        tokenizer = Tokenizer.load(tmp_path / "tokenizer")
        async with run_engine(
            executor_factory=lambda: FakeExecutor(CAPACITY), tokenizer=tokenizer, config=config, model_names=("M",)
        ) as engine:
            yield engine

    monkeypatch.setattr("aserve.llm.open_engine", open_engine)
    return configs


@pytest.fixture
def llm(opened):
    with LLM("M") as llm:
        yield llm


def texts(answers):
    return [answer[0].text for answer in answers]


def test_one_text_has_one_answer(llm):
    (choice,) = llm.generate("hello", max_tokens=5)
    assert len(choice.token_ids) == len(choice.text) == 5
    assert [len(choice.text) for choice in llm.generate("hello", max_tokens=5, n=3)] == [5, 5, 5]


def test_a_batch_is_answered_in_its_order_and_as_if_alone(llm):
    prompts = [f"prompt {i}" for i in range(40)]
    batch = llm.generate(prompts, max_tokens=7, progress=False)
    assert texts(batch) == [llm.generate(prompt, max_tokens=7)[0].text for prompt in prompts]
    assert llm.generate([], max_tokens=7) == []


def test_token_ids_are_a_prompt_too(llm):
    assert llm.generate([list(b"abc")], max_tokens=6) == [llm.generate("abc", max_tokens=6)]


def test_one_conversation_and_several(llm):
    hello, bye = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]
    one = llm.chat(hello, max_tokens=6)
    assert llm.chat([hello, bye], max_tokens=6)[0] == one


def test_an_error_takes_its_answers_place(llm):
    good, bad = llm.generate(["a", "b" * 1000], max_tokens=3, return_exceptions=True)
    assert isinstance(bad, ContextLengthError)
    assert len(good[0].text) == 3


def test_else_the_first_error_ends_the_others(llm):
    with pytest.raises(ContextLengthError):
        llm.generate(["a" * 10] * 20 + ["b" * 1000], max_tokens=200)
    stats = llm.stats()
    assert stats.num_requests["cancelled"] > 0
    assert len(llm.generate("a", max_tokens=3)[0].text) == 3


def test_a_wrong_option_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="temperature"):
        llm.generate("a", temperature=-1)
    with pytest.raises(TypeError, match="max_token"):
        llm.generate("a", max_token=1)


def test_threads_share_the_batch(llm):
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda i: llm.generate(f"prompt {i}", max_tokens=9)[0].text, range(24)))
    assert answers == texts(llm.generate([f"prompt {i}" for i in range(24)], max_tokens=9))


def test_settings_go_to_their_configuration(opened):
    LLM("M", max_model_len=64, kv_cache_tokens=512, policy="priority").close()
    (config,) = opened
    assert (config.model.max_model_len, config.cache.kv_cache_tokens, config.scheduler.policy) == (64, 512, "priority")
    whole = EngineConfig(model=ModelConfig(model="M"))
    LLM(whole).close()
    assert opened[-1] is whole


def test_a_setting_that_does_not_exist(opened):
    with pytest.raises(TypeError, match="max_model_length"):
        LLM("M", max_model_length=64)
    with pytest.raises(TypeError, match="max_model_len"):
        LLM(EngineConfig(model=ModelConfig(model="M")), max_model_len=64)
    assert opened == []


def test_a_model_that_cannot_be_opened_leaves_no_thread(opened):
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no such model"):
        LLM("missing")
    assert set(threading.enumerate()) == before


def test_after_closing(opened):
    before = set(threading.enumerate())
    llm = LLM("M")
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")
    assert set(threading.enumerate()) == before


@pytest.mark.anyio
async def test_a_batch_for_programs_with_an_event_loop(opened):
    from aserve import llm

    async with llm.open_engine(EngineConfig(model=ModelConfig(model="M"))) as engine:
        streams = [partial(engine.complete, f"prompt {i}", max_tokens=4) for i in range(20)]
        seen = []
        answers = await answer_all(engine, streams, on_answer=seen.append)
        assert len(seen) == len(answers) == 20
        assert not any(isinstance(answer, AserveError) for answer in answers)


PROGRAM = """
import sys
from aserve import LLM
llm = LLM(sys.argv[1], num_threads=1, max_model_len=2**14, kv_cache_tokens=2**15)
print("ready", flush=True)
if sys.argv[2] == "forgets":
    llm.generate("a", max_tokens=3)
else:
    try:
        llm.generate(["a"] * 4, max_tokens=2**13, ignore_eos=True)
    except KeyboardInterrupt:
        while llm.stats().num_running:
            pass
        print("still usable:", len(llm.generate("a", max_tokens=3, ignore_eos=True)[0].token_ids), flush=True)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("manner", ["forgets", "is interrupted"])
def test_a_program_ends(tiny_checkpoint, manner):
    """Without having closed the model; and Ctrl-C cancels the batch, and nothing else."""
    command = [sys.executable, "-c", PROGRAM, str(tiny_checkpoint), manner]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "ready\n"
        if manner == "is interrupted":
            threading.Event().wait(0.5)
            program.send_signal(signal.SIGINT)
        out, errors = program.communicate(timeout=120)
    assert (program.returncode, errors) == (0, "")
    assert out == ("still usable: 3\n" if manner == "is interrupted" else "")


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory):
    from aserve.testing import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2**14)


@pytest.mark.parametrize("inputs", ["abc", ["abc", "x" * 200], [97, 98], [[97, 98], "c"], ["t"] * 300])
def test_embed(llm, inputs):
    """A single input is a row, too; more of them than are handed over at once are one answer."""
    vectors = llm.embed(inputs, progress=False)
    single = isinstance(inputs, str) or isinstance(inputs[0], int)
    texts = [inputs] if single else inputs
    ids = [list(text.encode()) if isinstance(text, str) else text for text in texts]
    expected = [fake_vector(each, PoolingParams(kind=PoolingKind.LAST)) for each in ids]
    np.testing.assert_allclose(vectors, expected, rtol=1e-6)


def test_embed_refuses_what_cannot_be(llm):
    with pytest.raises(InvalidRequestError, match="there is no input"):
        llm.embed([])
    with pytest.raises(ContextLengthError):
        llm.embed("a" * 300)
