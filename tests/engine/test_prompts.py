"""Encoding happens in worker threads, and texts that can never fit are refused before it."""

from __future__ import annotations

import pytest

from aserve.core.errors import ContextLengthError, PromptError
from aserve.engine.prompts import PromptEncoder

pytestmark = pytest.mark.anyio


async def test_text_and_messages(running):
    async with running() as engine:
        assert await engine.encode("abc") == [256, 97, 98, 99]
        assert await engine.encode("abc", add_special_tokens=False) == [97, 98, 99]
        assert await engine.encode_chat([{"role": "user", "content": "a"}], suffix="!") == [256, 97, 33]


async def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(running):
    async with running() as engine:
        with pytest.raises(ContextLengthError) as info:
            await engine.encode("a" * 127)
        assert "128" in info.value.message
        assert info.value.param == "prompt"
        assert len(await engine.encode("a" * 126)) == 127


@pytest.mark.parametrize("content", ["a" * 10**6, [{"type": "text", "text": "a" * 600_000}] * 2])
async def test_absurd_lengths_are_refused_before_tokenising(running, content):
    async with running() as engine:
        with pytest.raises(ContextLengthError, match=r"at least \d+") as info:
            await engine.encode_chat([{"role": "user", "content": content}])
        assert info.value.param == "messages"
        assert engine.tokenizer.num_encoded == 0


LONG = "a" * 10**6


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"name": LONG}, {}),
        ({"reasoning_content": LONG}, {}),
        ({"tool_calls": [{"function": {"name": "f", "arguments": LONG}}]}, {}),
        ({}, {"documents": [{"title": LONG}]}),
        ({}, {"tools": [{"function": {"parameters": {"description": LONG}}}]}),
    ],
)
async def test_every_text_of_a_chat_counts(running, fields, options):
    async with running() as engine:
        with pytest.raises(ContextLengthError, match=r"at least \d+"):
            await engine.encode_chat([{"role": "user", "content": "a", **fields}], **options)
        assert engine.tokenizer.num_encoded == 0


@pytest.mark.parametrize("message", ["text", None, {"content": 5}, {"content": [3, {"text": 4}]}, {}])
async def test_odd_messages_are_the_templates_business(capacity, message):
    class Tokenizer:
        vocab_size = 10

        def encode_chat(self, messages):
            return [len(messages)]

    assert await PromptEncoder(Tokenizer(), capacity).encode_chat([message, message]) == [2]


async def test_long_tokens_are_taken_into_account(capacity):
    class Tokenizer:
        vocab_size = 3

        def token_bytes(self, token_id):
            return b" " * 10 ** (2 * token_id)

        def encode(self, text, *, add_special_tokens=True):
            return [1] * (len(text) // 10_000)

    encoder = PromptEncoder(Tokenizer(), capacity)
    assert len(await encoder.encode(" " * 10**6)) == 100
    with pytest.raises(ContextLengthError, match="at least 200"):
        await encoder.encode(" " * (2 * 10**6))


@pytest.mark.parametrize("kind", [RuntimeError, BaseException], ids=["error", "panic"])
async def test_a_fault_in_encoding_ends_its_request_alone(running, monkeypatch, caplog, kind):
    async with running() as engine:

        def fail(*_, **__):
            raise kind("/a/path in the tokenizer")

        with monkeypatch.context() as broken:
            broken.setattr(engine.tokenizer, "encode", fail)
            for use in (engine.encode("a"), engine.encode_chat([{"role": "user", "content": "a"}])):
                with pytest.raises(PromptError) as info:
                    await use
                assert (info.value.status, info.value.code) == (500, "prompt_failed")
                assert "path" not in info.value.message
        assert await engine.encode("a") == [256, 97]
    assert [r.levelname for r in caplog.records] == ["ERROR"] * 2
