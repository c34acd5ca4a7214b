"""Answers of the generation routes: the same streamed and whole, exact forms, errors as statuses."""

from __future__ import annotations

import json

import anyio
import pytest

from aserve.core.request import TokenLogprobs
from aserve.server.logprobs import CompletionLogprobs, token_text

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def choice_text(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": 12}),
        (CHAT, {"max_tokens": 1}),
        (CHAT, {"max_tokens": 30, "n": 3, "seed": 1}),
        (CHAT, {"max_tokens": 12, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"max_completion_tokens": 5}),
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": ["ab", "abc", "d"], "n": 2, "max_tokens": 7}),
        (COMPLETIONS, {"prompt": [97, 98, 99]}),
        (COMPLETIONS, {"prompt": [[97], [98, 99]], "max_tokens": 3}),
        (COMPLETIONS, {"logprobs": 3, "max_tokens": 5}),
        (COMPLETIONS, {"logprobs": 0, "max_tokens": 5}),
    ],
    ids=str,
)
async def test_streamed_and_whole_agree(serving, path, fields):
    prompt = {"messages": [{"role": "user", "content": "abc"}]} if path == CHAT else {"prompt": "abc"}
    body = {"model": "M", "temperature": 0, **prompt, **fields}
    async with serving() as client:
        whole = (await client.post(path, body)).json
        streamed = await client.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        assert streamed.data[-1] == "[DONE]"
        last = streamed.chunks[-1]
        assert last["choices"] == []
        details = {"prompt_tokens_details"}  # the second of two equal requests finds the first one's prefix
        assert {k: v for k, v in last["usage"].items() if k not in details} == {
            k: v for k, v in whole["usage"].items() if k not in details
        }
        assert all(c["usage"] is None for c in streamed.chunks[:-1])
        for key in ("id", "created", "model", "object"):
            assert len({c[key] for c in streamed.chunks}) == 1
        for choice in whole["choices"]:
            index = choice["index"]
            assert streamed.text(index) == choice_text(choice) != ""
            assert streamed.finish(index) == choice["finish_reason"] == "length"
            parts = [c for chunk in streamed.chunks for c in chunk["choices"] if c["index"] == index]
            pieces = [p["logprobs"] for p in parts if p["logprobs"]]
            if choice["logprobs"] is None:
                assert not pieces
                continue
            for key, value in choice["logprobs"].items():
                joined = None if value is None else [entry for piece in pieces for entry in piece[key]]
                assert joined == value
        await client.settled()


async def test_chat_object(serving):
    async with serving() as client:
        answer = (await client.chat("abc", max_tokens=4, n=2)).json
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        assert answer["usage"] == {
            "prompt_tokens": 22,
            "completion_tokens": 8,
            "total_tokens": 30,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        for index, choice in enumerate(answer["choices"]):
            text = choice["message"].pop("content")
            assert len(text) == 4
            assert choice == {
                "index": index,
                "message": {"role": "assistant", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }


async def test_form_of_a_chat_stream(serving):
    async with serving() as client:
        answer = await client.chat("abc", max_tokens=4, n=2, stream=True)
        assert answer.header("content-type").startswith("text/event-stream")
        assert answer.body.endswith(b"\n\ndata: [DONE]\n\n")
        for index in range(2):
            deltas = [c["delta"] for chunk in answer.chunks for c in chunk["choices"] if c["index"] == index]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert deltas[-1] == {}
            assert all(set(d) == {"content"} and d["content"] for d in deltas[1:-1])
        assert all("usage" not in chunk for chunk in answer.chunks)


async def test_the_last_text_and_the_end_go_out_together(serving):
    async with serving() as client:
        answer = await client.chat(max_tokens=1, stream=True)
        assert answer.num_sends == 3  # status, the empty part that flushes it, everything else


async def test_continuous_usage(serving):
    async with serving() as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await client.chat(max_tokens=3, stream=True, stream_options=options)
        counts = [c["usage"]["completion_tokens"] for c in answer.chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 3


@pytest.mark.parametrize(
    ("num_prompts", "n", "param"), [(1, 11, "n"), (11, 1, "prompt"), (11, 2, "prompt"), (4, 3, "n"), (5, 2, None)]
)
async def test_more_answers_than_there_are_places(serving, num_prompts, n, param):
    """What can never be admitted is the client's mistake; 503 would ask it to try again for ever."""
    async with serving(max_queue=2) as client:
        answer = await client.complete(["a"] * num_prompts, n=n, max_tokens=1)
        if param is None:
            assert answer.status == 200
        else:
            assert (answer.status, answer.error["param"]) == (400, param)
            assert "10" in answer.error["message"]
            assert "retry-after" not in dict(answer.headers)
        if num_prompts == 1:
            assert (await client.chat(n=n)).error["param"] == param


@pytest.mark.parametrize("prompts", [["abc"], ["abc", "d"]], ids=len)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_token_that_ends_an_answer_counts(serving, prompts, stream):
    """As OpenAI and vLLM count it, though it is not part of the text."""
    async with serving() as client:
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if stream else {}
        fields = {"stop_token_ids": list(range(97, 123)), "n": 2, "prompt": prompts, **options}
        answer = await client.complete(max_tokens=12, stream=stream, **fields)
        usage = answer.chunks[-1]["usage"] if stream else answer.json["usage"]
        assert usage["completion_tokens"] == 2 * len(prompts)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_cached_tokens(serving):
    async with serving() as client:
        assert (await client.complete("x" * 40)).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        cached = (await client.complete("x" * 40)).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached < 40


async def test_stop_strings_and_ends(serving):
    async with serving() as client:
        text = (await client.complete(max_tokens=12)).json["choices"][0]["text"]
        stop = text[5:7]
        for fields in ({}, {"stream": True}):
            answer = await client.complete(max_tokens=12, stop=[stop, "never"], **fields)
            got = (
                (answer.text(), answer.finish())
                if fields
                else (answer.json["choices"][0]["text"], answer.json["choices"][0]["finish_reason"])
            )
            assert got == (text[: text.index(stop)], "stop")
        kept = await client.complete(max_tokens=12, stop=stop, include_stop_str_in_output=True)
        assert kept.json["choices"][0]["text"] == text[: text.index(stop) + 2]
        by_id = await client.complete(max_tokens=12, stop_token_ids=[ord(text[3])], ignore_eos=True)
        assert by_id.json["choices"][0]["text"] == text[: text.index(text[3])]
        await client.settled()


async def test_limits_of_the_answer(serving):
    async with serving() as client:
        assert (await client.complete()).json["usage"]["completion_tokens"] == 16
        whole = (await client.chat("abc")).json
        assert whole["usage"]["total_tokens"] == 512
        assert (await client.chat("abc", max_tokens=10**18)).json["usage"]["total_tokens"] == 512
        one = await client.complete("a" * 511)
        assert one.json["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "status", "code", "param"),
    [
        (COMPLETIONS, {"prompt": "a" * 512}, 400, "context_length_exceeded", "prompt"),
        (COMPLETIONS, {"prompt": "a" * 600000}, 400, "context_length_exceeded", "prompt"),
        (COMPLETIONS, {"prompt": [97] * 512}, 400, "context_length_exceeded", "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b" * 600]}, 400, "context_length_exceeded", "prompt"),
        (COMPLETIONS, {"prompt": [1, 260]}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": [1, -1]}, 400, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": ""}, 400, "invalid_value", "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, 400, "context_length_exceeded", "messages"),
        (CHAT, {"logit_bias": {"260": 1}}, 400, "invalid_value", "logit_bias"),
        (CHAT, {"stop_token_ids": [260]}, 400, "invalid_value", "stop_token_ids"),
        (CHAT, {"model": "other"}, 404, "model_not_found", "model"),
        (CHAT, {"temperature": "hot"}, 400, "invalid_value", "temperature"),
        (CHAT, {"tools": [{}]}, 400, "unsupported_parameter", "tools"),
    ],
    ids=lambda v: str(v)[:40],
)
async def test_mistakes_are_statuses(serving, path, fields, status, code, param, stream):
    prompt = {"messages": [{"role": "user", "content": "abc"}]} if path == CHAT else {}
    async with serving() as client:
        answer = await client.post(path, {"model": "M", **prompt, **fields, "stream": stream})
        assert answer.status == status
        assert answer.header("content-type") == "application/json"
        assert answer.error["code"] == code
        assert answer.error["param"] == param
        assert answer.error["type"] == "invalid_request_error"
        await client.settled()


async def test_a_full_queue_is_503(serving, make_exchange):
    async with serving(max_queue=2, max_num_seqs=1, step_s=0.005) as client, anyio.create_task_group() as tasks:
        engine = client.app.slot.engine
        running = make_exchange(json.dumps({"model": "M", "prompt": "a", "n": 2, "max_tokens": 500}).encode())
        tasks.start_soon(client.run, running, "POST", COMPLETIONS, {"content-type": "application/json"})
        with anyio.fail_after(10):
            while engine.stats().num_waiting < 1:
                await anyio.sleep(0.002)
        too_many = await client.complete(["a", "b"], stream=True)  # the first still fits, but goes with the second
        assert too_many.status == 503
        assert too_many.error["code"] == "queue_full"
        assert int(too_many.header("retry-after")) >= 1
        running.disconnect()
        await client.settled()
        assert (await client.chat(max_tokens=1)).status == 200


@pytest.mark.parametrize("chat", [False, True])
async def test_prompts_that_wait_to_be_encoded_are_in_the_queue(serving, make_exchange, monkeypatch, chat):
    async with serving(max_queue=0, max_num_seqs=2) as client, anyio.create_task_group() as tasks:
        engine, released, num_begun = client.app.slot.engine, anyio.Event(), 0
        kind = "encode_chat" if chat else "encode"
        encode = getattr(engine, kind)

        async def slow(*args, **options):
            nonlocal num_begun
            num_begun += 1
            await released.wait()
            return await encode(*args, **options)

        monkeypatch.setattr(engine, kind, slow)
        fields = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
        body = json.dumps({"model": "M", "max_tokens": 2, **fields}).encode()
        path = "/v1/chat/completions" if chat else "/v1/completions"
        first = [make_exchange(body) for _ in range(2)]
        for exchange in first:
            tasks.start_soon(client.run, exchange, "POST", path, {"content-type": "application/json"})
        await client.until(lambda: num_begun == 2)
        with anyio.fail_after(10):
            refused = await client.post(path, body)
        assert refused.status == 503
        assert refused.error["code"] == "queue_full"
        assert num_begun == 2, "it was refused before it was encoded"
        released.set()
        await client.until(lambda: all(exchange.answer.complete for exchange in first))
        assert [exchange.answer.status for exchange in first] == [200, 200]


async def test_defaults_come_from_the_model(serving, tokenizer, monkeypatch):
    seen = []
    async with serving() as client:
        engine = client.app.slot.engine
        generate = engine.generate
        monkeypatch.setattr(engine, "generate", lambda r: seen.append(r) or generate(r))
        monkeypatch.setattr(tokenizer, "generation_defaults", {"temperature": 0.5, "top_k": 7, "top_p": 0.9})
        body = {"model": "M", "prompt": "a", "max_tokens": 1}
        await client.post(COMPLETIONS, body)
        await client.post(COMPLETIONS, {**body, "temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0.1})
        monkeypatch.setattr(tokenizer, "generation_defaults", {})
        await client.post(COMPLETIONS, body)
    values = [(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p, r.sampling.min_p) for r in seen]
    assert values == [(0.5, 7, 0.9, 0.0), (0.0, 0, 1.0, 0.1), (1.0, 0, 1.0, 0.0)]


async def test_sampling_fields_reach_the_engine(serving, monkeypatch):
    seen = []
    async with serving() as client:
        engine = client.app.slot.engine
        generate = engine.generate
        monkeypatch.setattr(engine, "generate", lambda r: seen.append(r) or generate(r))
        await client.complete(
            ["a", "a"],
            n=2,
            max_tokens=3,
            min_tokens=2,
            seed=-1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={"9": 1, "5": -1},
            logprobs=4,
            stop=["zzz"],
            stop_token_ids=[7],
            skip_special_tokens=False,
            priority=3,
            cache_salt="s",
        )
        await client.complete(["a", "a"], max_tokens=1)
        await client.complete("a", max_tokens=1, ignore_eos=True)
    request = seen[0]
    assert request.n == 2
    assert request.stop == ("zzz",)
    assert request.priority == 3
    assert request.cache_salt == b"s"
    assert not request.skip_special_tokens
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (3, 2, 2**64 - 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert sampling.logit_bias == ((5, -1.0), (9, 1.0))
    assert sampling.stop_token_ids == (7, 257)
    assert sampling.num_logprobs == 4
    assert seen[1].sampling.seed == seen[0].sampling.seed  # a given seed holds for each prompt
    assert seen[2].sampling.seed != seen[3].sampling.seed  # drawn ones differ
    assert seen[4].sampling.stop_token_ids == ()
    assert len({r.request_id for r in seen}) == len(seen)


async def test_chat_template_options(serving):
    async with serving() as client:
        with_prompt = (await client.chat("abc", max_tokens=1)).json["usage"]["prompt_tokens"]
        without = await client.chat("abc", max_tokens=1, add_generation_prompt=False, chat_template_kwargs={"x": 1})
        assert without.json["usage"]["prompt_tokens"] < with_prompt


async def test_output_that_is_not_utf8(serving):
    async with serving(next_token=lambda tokens, seed: 0xF0) as client:
        whole = (await client.complete(max_tokens=3)).json["choices"][0]["text"]
        streamed = await client.complete(max_tokens=3, stream=True, logprobs=0)
        assert streamed.text() == whole
        assert whole.strip("\ufffd") == ""
        pieces = [c["logprobs"]["tokens"] for chunk in streamed.chunks for c in chunk["choices"] if c["logprobs"]]
        assert [t for p in pieces for t in p] == ["bytes:\\xf0"] * 3


async def test_a_failure_in_mid_stream(serving):
    """A NaN in one sequence: an error event ends its stream, others go on."""

    def model(tokens, seed):
        return -2 if len(tokens) == 45 and tokens[0] == ord("P") else ord("k")

    async with serving(next_token=model) as client:
        bad = await client.complete("P" * 40, max_tokens=20, stream=True)
        assert bad.status == 200
        assert bad.complete
        assert "[DONE]" not in bad.data
        assert json.loads(bad.data[-1])["error"]["code"] == "generation_failed"
        reasons = [c["finish_reason"] for chunk in bad.chunks[:-1] for c in chunk["choices"]]
        assert not any(reasons)
        assert (await client.complete("P" * 40, max_tokens=20)).status == 500
        assert (await client.complete("Q" * 40, max_tokens=20)).status == 200
        await client.settled()


async def test_engine_death_in_mid_stream(serving):
    async with serving(fail_at_step=6) as client:
        answer = await client.chat(max_tokens=50, stream=True)
        assert answer.status == 200
        assert json.loads(answer.data[-1])["error"]["code"] == "engine_dead"
        assert answer.complete


async def test_a_fault_of_the_server_is_a_plain_500(serving, monkeypatch, caplog):
    async with serving() as client:

        def broken(*_, **__):
            raise KeyError("/secret/path.py")

        monkeypatch.setattr(client.app.slot.engine, "fit", broken)
        answer = await client.chat()
        assert answer.status == 500
        assert "secret" not in answer.body.decode()
        assert "secret" in caplog.text


# -- log-probabilities ------------------------------------------------------------------------------------------------


def test_tokens_that_are_no_text():
    assert token_text("é".encode()) == "é"
    assert token_text(b"\xf0\x9f") == "bytes:\\xf0\\x9f"


def test_text_offsets_count_characters():
    pieces = [b"a", "é".encode(), b"\xf0\x9f", b"\x98\x80", b"bc", b"", b"d"]
    lists = CompletionLogprobs(lambda i: pieces[i]).lists(tuple(TokenLogprobs(i, -1.0) for i in range(7)))
    assert lists["text_offset"] == [0, 1, 2, 2, 3, 5, 5]


def test_minus_infinity_is_clamped():
    lists = CompletionLogprobs(lambda i: b"a").lists((TokenLogprobs(0, float("-inf"), ((1, float("-inf")),)),))
    assert lists["token_logprobs"] == [-9999.0]
    assert lists["top_logprobs"] == [{"a": -9999.0}]
