"""Grammars are compiled beside everything else, within a time limit, and a failing one ends its own request only."""

from __future__ import annotations

import json
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import anyio
import pytest

from aserve.assembly import grammar_compiler
from aserve.core.config import EngineConfig, GrammarConfig, ModelConfig
from aserve.core.errors import (
    GrammarError,
    GrammarTimeoutError,
    InvalidGrammarError,
    InvalidRequestError,
    NoTokenLeftError,
    PromptError,
    UnsupportedFieldError,
)
from aserve.core.grammar import Grammar, GrammarKind
from aserve.core.request import FinishReason
from aserve.core.step import EXCLUDED_TOKEN
from aserve.engine.engine import run_engine
from aserve.grammar import GrammarCompiler
from aserve.testing import FakeExecutor, write_byte_tokenizer
from aserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

WORDS = Grammar(GrammarKind.CHOICE, '["yes", "no"]')
LETTERS = Grammar(GrammarKind.REGEX, "[a-z]{3,9}")
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return Tokenizer.load(folder)


class SlowCompiler:
    """A compiler that waits for each source to be let through, apart from those that are quick."""

    def __init__(self, real: GrammarCompiler):
        self.real = real
        self.gates: dict[str, threading.Event] = {}
        self.begun: dict[str, threading.Event] = {}

    def hold(self, grammar: Grammar) -> threading.Event:
        self.begun[grammar.source] = threading.Event()
        self.gates[grammar.source] = threading.Event()
        return self.gates[grammar.source]

    def find(self, grammar):
        return self.real.find(grammar)

    def warm_up(self):
        self.real.warm_up()

    def compile(self, grammar):
        if grammar.source in self.gates:
            self.begun[grammar.source].set()
            assert self.gates[grammar.source].wait(60)
        if grammar.source == "panic":
            raise BaseException("a panic")
        return self.real.compile(grammar)


@pytest.fixture
def opened(tokenizer, capacity):
    @asynccontextmanager
    async def open_engine(*, timeout_s=60.0, executor=FakeExecutor, **options):
        real = grammar_compiler(tokenizer, size=8)
        slow = SlowCompiler(real)
        config = EngineConfig(model=ModelConfig(model="fake"), grammar=GrammarConfig(grammar_timeout_s=timeout_s))
        async with run_engine(
            executor_factory=partial(executor, replace(capacity, **options), grammars=real),
            tokenizer=tokenizer,
            config=config,
            model_names=("fake",),
            grammars=slow,
        ) as engine:
            yield engine, slow

    return open_engine


async def ask(engine, grammar=None, max_tokens=30, **options):
    """Text and finish reason of one answer."""
    text, reason = "", None
    async for delta in engine.chat(MESSAGES, max_tokens=max_tokens, grammar=grammar, **options):
        text, reason = text + delta.text, delta.finish_reason or reason
    return text, reason


@pytest.mark.parametrize("depth", [1, 2])
async def test_answers_keep_to_their_grammar(opened, depth, within):
    with within():
        async with opened(max_in_flight=depth) as (engine, _):
            assert (await ask(engine, WORDS))[0] in ("yes", "no")
            text, reason = await ask(engine, LETTERS)
            assert text.isalpha() and len(text) == 9 and reason is FinishReason.STOP
            assert await ask(engine, LETTERS, max_tokens=2) == (text[:2], FinishReason.LENGTH)
            assert await ask(engine, LETTERS, max_tokens=9) == (text, FinishReason.STOP), "complete with its last token"


async def test_choices_and_others_side_by_side_are_as_alone(opened, within):
    with within():
        async with opened(max_in_flight=2) as (engine, _):
            alone = await ask(engine)
            bound = await ask(engine, LETTERS)
            both: dict[int, object] = {}

            async def one(number, grammar):
                both[number] = await ask(engine, grammar)

            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(one, number, LETTERS if number % 2 else None)
            assert [both[number] for number in range(8)] == [alone, bound] * 4


async def test_preempted_answers_keep_to_their_grammar(opened, within):
    """The cache holds one of the four at their longest, so that tokens are taken again."""
    grammar = Grammar(GrammarKind.REGEX, "(ab|cd|[x-z]q){12}")
    with within():
        async with opened(num_blocks=20) as (engine, _):
            alone = await ask(engine, grammar)
            texts = [""] * 4
            async for delta in engine.chat(MESSAGES, max_tokens=30, grammar=grammar, n=4):
                texts[delta.choice] += delta.text
            assert texts == [alone[0]] * 4
            assert engine.stats().num_preemptions > 0


async def test_a_slow_grammar_delays_nobody_else(opened, within):
    slow_one = Grammar(GrammarKind.REGEX, "slow")
    with within():
        async with opened() as (engine, compiler):
            gate = compiler.hold(slow_one)
            async with anyio.create_task_group() as tasks:
                answers: list[object] = []

                async def slowly():
                    answers.append(await ask(engine, slow_one))

                tasks.start_soon(slowly)
                await anyio.to_thread.run_sync(compiler.begun["slow"].wait, 60)
                assert (await ask(engine, WORDS))[0] in ("yes", "no"), "another grammar is compiled meanwhile"
                assert (await ask(engine, max_tokens=5))[1] is FinishReason.LENGTH
                assert answers == []
                gate.set()
            assert answers == [("slow", FinishReason.STOP)]


async def test_a_grammar_that_takes_too_long_is_refused(opened, within):
    slow_one = Grammar(GrammarKind.REGEX, "slow")
    with within():
        async with opened(timeout_s=0.05) as (engine, compiler):
            gate = compiler.hold(slow_one)
            try:
                with pytest.raises(GrammarTimeoutError, match=r"longer to compile than the 0\.05 s") as info:
                    await ask(engine, slow_one)
            finally:
                gate.set()
            assert info.value.status == 400
            while compiler.find(slow_one) is None:  # its thread goes on, and what it makes is kept
                await anyio.sleep(0.01)
            assert await ask(engine, slow_one) == ("slow", FinishReason.STOP)


async def test_who_leaves_while_its_grammar_is_compiled_leaves_nothing(opened, within):
    slow_one = Grammar(GrammarKind.REGEX, "slow")
    with within():
        async with opened() as (engine, compiler):
            gate = compiler.hold(slow_one)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, engine, slow_one)
                await anyio.to_thread.run_sync(compiler.begun["slow"].wait, 60)
                tasks.cancel_scope.cancel()
            gate.set()
            await engine.wait_idle()
            assert (await ask(engine, WORDS))[0] in ("yes", "no")


async def test_more_grammars_than_threads_are_compiled_one_after_the_other(opened, within):
    many = [Grammar(GrammarKind.CHOICE, json.dumps([f"word {i}"])) for i in range(20)]
    with within():
        async with opened() as (engine, _):
            answers: dict[int, object] = {}

            async def one(number):
                answers[number] = await ask(engine, many[number])

            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(one, number)
            assert answers == {i: (f"word {i}", FinishReason.STOP) for i in range(20)}


async def test_faults_of_the_compiler_are_named(opened, within):
    with within():
        async with opened() as (engine, _):
            with pytest.raises(InvalidGrammarError, match="unclosed"):
                await ask(engine, Grammar(GrammarKind.REGEX, "(a"))
            with pytest.raises(PromptError, match="others go on"):
                await ask(engine, Grammar(GrammarKind.REGEX, "panic"))
            with pytest.raises(InvalidRequestError, match="Grammar"):
                await ask(engine, "json")  # type: ignore[arg-type]
            assert (await ask(engine, WORDS))[0] in ("yes", "no")


async def test_an_engine_without_grammars_refuses_them(running, within):
    with within():
        async with running() as engine:
            with pytest.raises(UnsupportedFieldError) as info:
                await ask(engine, WORDS)
            assert info.value.param == "grammar"


@pytest.mark.parametrize(
    ("wrong", "error", "status"), [(0, GrammarError, 500), (EXCLUDED_TOKEN, NoTokenLeftError, 400)]
)
async def test_a_grammar_that_fails_ends_its_own_request_only(opened, within, wrong, error, status):
    class Failing(FakeExecutor):
        def _within(self, matcher, position, token):
            right = super()._within(matcher, position, token)
            return wrong if right == ord("!") else right

    with within():
        async with opened(executor=Failing) as (engine, _):
            async with anyio.create_task_group() as tasks:
                others: list[object] = []

                async def other():
                    others.append(await ask(engine, LETTERS))

                tasks.start_soon(other)
                with pytest.raises(error) as info:
                    await ask(engine, Grammar(GrammarKind.REGEX, "ab!c"))
                assert info.value.status == status
            assert others[0][1] is FinishReason.STOP
            await engine.wait_idle()
            assert engine.stats().num_used_blocks == 0
