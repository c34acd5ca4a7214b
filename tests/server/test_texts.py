"""Token ids of texts and back, and requests that are ended by their id."""

from __future__ import annotations

import json

import anyio
import pytest

from aserve.testing import BOS, EOS, IM_END, IM_START

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hi"}


async def tokenize(client, **fields):
    return await client.post("/tokenize", fields)


async def test_a_text_and_back(serving):
    async with serving() as client:
        answer = await tokenize(client, prompt="añ</s>", return_token_strs=True)
        tokens = [97, 0xC3, 0xB1, EOS]
        assert answer.json == {
            "count": 4, "max_model_len": 512, "tokens": tokens, "token_strs": ["a", "\ufffd", "\ufffd", "</s>"],
        }  # fmt: skip
        back = await client.post("/detokenize", {"model": "M", "tokens": tokens})
        assert back.json == {"prompt": "añ</s>"}
        assert (await tokenize(client, prompt="")).json["tokens"] == []


async def test_a_conversation_is_the_prompt_that_chat_makes_of_it(serving):
    async with serving() as client:
        ids = [IM_START, *b"user\nhi", IM_END, *b"\n"]
        answer = await tokenize(client, messages=[USER], add_generation_prompt=False)
        assert (answer.json["tokens"], answer.json["token_strs"]) == (ids, None)
        whole = await tokenize(client, messages=[USER], model="M")
        assert whole.json["tokens"] == [*ids, IM_START, *b"assistant\n"]
        used = (await client.chat("hi", max_tokens=1)).json["usage"]["prompt_tokens"]
        assert whole.json["count"] == used


async def test_longer_than_the_context_is_a_count_all_the_same(serving):
    async with serving() as client:
        assert (await tokenize(client, prompt="a" * 100_000)).json["count"] == 100_000


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"messages": 1}}, 400,
         "chat_template_kwargs.messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/detokenize", {"tokens": [BOS, 260]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/abort", {"request_id": "nobody"}, 404, "request_id"),
        ("/abort", {"request_id": ""}, 400, "request_id"),
        ("/abort", {}, 400, "request_id"),
    ],
)  # fmt: skip
async def test_what_cannot_be(serving, path, body, status, param):
    async with serving() as client:
        answer = await client.post(path, body)
        assert (answer.status, answer.error["param"]) == (status, param)


def body(**fields):
    return json.dumps({"model": "M", "prompt": "abc", "max_tokens": 400, "ignore_eos": True, **fields}).encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["waiting", "running"])
async def test_aborting_by_the_id_of_the_header(serving, make_exchange, gate, stream, moment):
    async with serving(gate=gate, max_num_seqs=1) as client, anyio.create_task_group() as tasks:
        if moment == "waiting":
            tasks.start_soon(client.complete)
            await client.submitted(1)
        exchange = make_exchange(body(stream=stream))
        headers = {**JSON, "x-request-id": "mine"}
        tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, headers)
        await client.submitted(1 + (moment == "waiting"))
        answer = await client.post("/abort", {"request_id": "mine"})
        assert (answer.status, answer.json) == (200, {"request_id": "mine", "aborted": 1})
        await exchange.wait_for(lambda answer: answer.complete)
        error = json.loads(exchange.answer.data[-1])["error"] if stream else exchange.answer.error
        assert error["code"] == "request_aborted"
        assert exchange.answer.status == (200 if stream else 409)
        assert (await client.post("/abort", {"request_id": "mine"})).status == 404
        gate.open()
        await client.settled()


async def test_aborting_by_the_id_of_the_answer(serving, make_exchange):
    async with serving(step_s=0.002) as client, anyio.create_task_group() as tasks:
        exchange = make_exchange(body(stream=True))
        tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, JSON)
        await exchange.wait_for(lambda answer: answer.chunks)
        answer = await client.post("/abort", {"request_id": exchange.answer.chunks[0]["id"]})
        assert answer.json["aborted"] == 1
        await exchange.wait_for(lambda answer: answer.complete)
        assert "[DONE]" not in exchange.answer.data


async def test_nobody_ends_the_requests_of_another_key(serving, make_exchange, gate):
    server = {"api_key": ("one", "two"), "max_requests_per_key": 1}
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with serving(gate=gate, server=server) as client, anyio.create_task_group() as tasks:
        exchange = make_exchange(body())
        tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, {**JSON, **mine, "x-request-id": "x"})
        await client.submitted(1)
        assert (await client.post("/abort", {"request_id": "x"}, other)).status == 404
        assert (await client.post("/abort", {"request_id": "x"}, mine)).status == 200  # beyond the limit of its key
        await exchange.wait_for(lambda answer: answer.complete)
        gate.open()
