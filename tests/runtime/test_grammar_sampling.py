"""A random model at temperature 1 within a grammar: what ends with ``stop`` is right, whatever else is asked."""

from __future__ import annotations

import json
import math
from contextlib import asynccontextmanager

import anyio
import jsonschema
import pytest

from aserve.assembly import open_engine
from aserve.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from aserve.core.errors import NoTokenLeftError
from aserve.core.grammar import Grammar, GrammarKind
from aserve.core.request import FinishReason
from aserve.testing import BOS, EOS

pytestmark = pytest.mark.anyio

ITEM = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b\u00e9", None]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "code": {"type": "string", "pattern": "^[A-C]{2}[0-9]$"},
    },
    "required": ["kind", "count", "flags", "code"],
    "additionalProperties": False,
}
SCHEMAS = [
    ITEM,
    {"type": "array", "items": {"type": "integer", "maximum": 50, "minimum": 0}, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"const": {"x": [1, "two"]}}, {"type": "string", "maxLength": 6}]},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 3, "multipleOf": 0.25},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}}, "additionalProperties": False},
]
SOME = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(ITEM))


def of(schema):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.fixture
def anyio_backend():
    return "trio"


@pytest.fixture
def opened(tiny_model):
    @asynccontextmanager
    async def open_one(*, tokens=4096, **scheduler):
        config = EngineConfig(
            model=ModelConfig(model=str(tiny_model), device="cpu", num_threads=1),
            cache=CacheConfig(kv_cache_tokens=tokens),
            scheduler=SchedulerConfig(**scheduler),
        )
        async with open_engine(config) as engine:
            yield engine

    return open_one


async def ask(engine, grammar, *, max_tokens=120, **options):
    """By choice: (text, reason, ids, log-probabilities)."""
    n = options.get("n", 1)
    found = [["", None, [], []] for _ in range(n)]
    async for delta in engine.complete("prompt", grammar=grammar, max_tokens=max_tokens, **options):
        choice = found[delta.choice]
        choice[0] += delta.text
        choice[1] = delta.finish_reason or choice[1]
        choice[2] += delta.token_ids
        choice[3] += delta.logprobs
    return found


async def test_whatever_stops_validates(opened):
    """Eight seeds of each schema, all in one batch, beside requests without a grammar."""
    ended = 0
    async with opened(max_in_flight=2) as engine:

        async def one(schema, seed):
            nonlocal ended
            ((text, reason, _, _),) = await ask(engine, of(schema), temperature=1.0, seed=seed)
            if reason is FinishReason.STOP:
                jsonschema.validate(json.loads(text), schema)
                ended += 1

        async with anyio.create_task_group() as tasks:
            for seed in range(8):
                tasks.start_soon(lambda seed=seed: ask(engine, None, temperature=1.0, seed=seed, max_tokens=30))
                for schema in SCHEMAS:
                    tasks.start_soon(one, schema, seed)
    assert ended >= 35, "nearly all come to an end"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.5, "min_p": 0.01},
        {"temperature": 1.0, "presence_penalty": 1.5, "repetition_penalty": 1.4},
        {"temperature": 1.0, "logit_bias": {ord("}"): -100.0, ord("{"): -100.0, ord("x"): 100.0}},
        {"temperature": 1.0, "ignore_eos": True},
        {"temperature": 1.0, "min_tokens": 100},
        {"temperature": 1.0, "stop_token_ids": [ord("\n"), ord(" ")]},
        {"temperature": 1.0, "num_logprobs": 5},
        {"temperature": 1.0, "n": 3},
    ],
    ids="-".join,
)
async def test_every_way_of_sampling_keeps_to_the_grammar(opened, options):
    async with opened() as engine:
        ended = 0
        for seed in range(3):
            for text, reason, ids, logprobs in await ask(engine, SOME, seed=seed, max_tokens=150, **options):
                if reason is FinishReason.STOP:
                    ended += 1
                    jsonschema.validate(json.loads(text), ITEM)
                    assert text.encode() == bytes(ids)
                for entry in logprobs:
                    values = [entry.logprob, *(value for _, value in entry.top)]
                    assert all(math.isfinite(value) and value <= 0 for value in values)
        assert ended


async def test_the_seed_decides_whatever_else_runs(opened):
    """The same tokens alone, overlapped, in a batch, and preempted."""
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 60}
    async with opened() as engine:
        alone = await ask(engine, SOME, **options)
        four = await ask(engine, SOME, n=4, **options)
    async with opened(max_in_flight=2) as engine:
        assert await ask(engine, SOME, **options) == alone
        assert await ask(engine, SOME, n=4, **options) == four
    async with opened(tokens=96) as engine:
        assert await ask(engine, SOME, n=4, **options) == four
        assert engine.stats().num_preemptions
    assert four[0] == alone[0]


async def test_log_probabilities_are_those_among_what_is_allowed(opened):
    async with opened() as engine:
        ((text, _, _, logprobs),) = await ask(
            engine, Grammar(GrammarKind.CHOICE, '["ab"]'), temperature=1.0, num_logprobs=4
        )
    assert text == "ab"
    assert [(entry.token_id, entry.logprob, len(entry.top)) for entry in logprobs] == [(97, 0.0, 1), (98, 0.0, 1)]


async def test_constraints_that_exclude_every_token_are_named(opened):
    """A special token is no content here: where only it may follow, and it ends nothing, there is no way on."""
    async with opened() as engine:
        grammar = Grammar(GrammarKind.LARK, 'start: "a" <|im_start|>')
        ((text, reason, _, _),) = await ask(engine, grammar, temperature=0)
        assert (text, reason) == ("a", FinishReason.STOP)
        with pytest.raises(NoTokenLeftError) as info:
            await ask(engine, grammar, temperature=0, stop_token_ids=[258], ignore_eos=True)
        assert info.value.status == 400
        ((_, reason, _, _),) = await ask(engine, None, max_tokens=5, seed=0, logit_bias={EOS: -100.0, BOS: -100.0})
        assert reason is FinishReason.LENGTH


async def test_cancelled_slots_serve_the_next(opened):
    async with opened(max_num_seqs=2, max_in_flight=2) as engine:
        for number in range(12):
            stream = engine.complete("prompt", grammar=SOME, max_tokens=100, temperature=1.0, seed=number)
            async with stream:
                await anext(aiter(stream))
            ((text, reason, _, _),) = await ask(
                engine, Grammar(GrammarKind.CHOICE, '["ab", "cd"]'), temperature=1.0, seed=number
            )
            assert text in ("ab", "cd")
            assert reason is FinishReason.STOP
        await engine.wait_idle()
        assert engine.stats().num_used_blocks == 0
