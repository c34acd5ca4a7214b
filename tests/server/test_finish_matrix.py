"""Every way an answer ends, on every generation route, streamed and not: what the client reads is what it needs."""

from __future__ import annotations

import json

import anyio
import pytest

from aserve.core.errors import EngineDrainingError
from aserve.core.step import INVALID_TOKEN
from aserve.testing import EOS

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


def body(route, **fields):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if route == CHAT else {"prompt": "x"}
    return json.dumps({"model": "M", "max_tokens": 6, "temperature": 0, **prompt, **fields}).encode()


def after(count, token):
    """A model that says ``a`` so often, whatever the prompt, and then this."""
    told = {}

    def next_token(tokens, seed):
        start = told.setdefault("start", len(tokens))
        return token if len(tokens) - start >= count else ord("a")

    return next_token


def outcome(answer, route, stream):
    """(text, finish reason, error code, whether the stream has its closing mark)"""
    if not stream:
        if answer.status != 200:
            return None, None, answer.error["code"], False
        choice = answer.json["choices"][0]
        text = choice["message"]["content"] if route == CHAT else choice["text"]
        return text, choice["finish_reason"], None, False
    done = answer.data[-1] == "[DONE]"
    events = [json.loads(event) for event in answer.data if event != "[DONE]"]
    errors = [event["error"] for event in events if "error" in event]
    choices = [choice for event in events for choice in event.get("choices", ())]
    text = "".join(choice["delta"].get("content") or "" if route == CHAT else choice["text"] for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) + len(errors) == 1, "one end, and only one"
    if errors:
        assert "error" in events[-1], "the error is the last event"
        assert set(errors[0]) == {"message", "type", "param", "code"}
    return text, reasons[0] if reasons else None, errors[0]["code"] if errors else None, done


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
class TestEnds:
    @pytest.mark.parametrize(
        ("model", "fields", "text", "reason"),
        [
            ((2, EOS), {}, "aa", "stop"),
            ((0, EOS), {}, "", "stop"),
            ((2, ord("b")), {"stop": "b"}, "aa", "stop"),
            ((2, ord("b")), {"stop_token_ids": [98]}, "aa", "stop"),
            ((9, EOS), {}, "aaaaaa", "length"),
            ((9, EOS), {"max_tokens": 1}, "a", "length"),
            ((6, EOS), {"stop": "aaaaaaa"}, "aaaaaa", "length"),
        ],
        ids=["end of text", "at once", "stop string", "stop token", "length", "one token", "held back"],
    )
    async def test_good_ends(self, serving, route, stream, model, fields, text, reason):
        async with serving(next_token=after(*model)) as client:
            answer = await client.request("POST", route, body(route, stream=stream, **fields), JSON)
            assert answer.status == 200
            assert outcome(answer, route, stream) == (text, reason, None, stream)
            await client.settled()

    async def test_logits_that_are_no_numbers(self, serving, route, stream):
        async with serving(next_token=after(2, INVALID_TOKEN)) as client:
            answer = await client.request("POST", route, body(route, stream=stream), JSON)
            assert answer.status == (200 if stream else 500)
            assert outcome(answer, route, stream)[1:] == (None, "generation_failed", False)
            await client.settled()
            assert (await client.get("/health")).status == 200, "of one request only"

    async def test_the_engine_dies(self, serving, route, stream):
        async with serving(fail_at_step=3) as client:
            answer = await client.request("POST", route, body(route, stream=stream), JSON)
            assert answer.status == (200 if stream else 503)
            assert outcome(answer, route, stream)[1:] == (None, "engine_dead", False)
            health = await client.get("/health")
            assert health.status == 503
            assert "failed" in health.json["reason"]
            again = await client.request("POST", route, body(route, stream=stream), JSON)
            assert (again.status, again.error["code"]) == (503, "engine_dead")
            for text in (answer.body, health.body, again.body):
                for leak in (b"Traceback", b"/aserve/", b"RuntimeError", b"injected"):
                    assert leak not in text

    async def test_the_server_ends(self, serving, make_exchange, gate, route, stream):
        async with serving(gate=gate) as client, anyio.create_task_group() as tasks:
            exchange = make_exchange(body(route, stream=stream))
            tasks.start_soon(client.run, exchange, "POST", route, JSON)
            await client.submitted(1)
            gate.release(2)
            engine = client.app.slot.engine
            await client.until(lambda: engine.stats().num_generated_tokens >= 1)
            engine.start_draining()
            engine.close_all(lambda: EngineDrainingError("the server is shutting down", retry_after_s=3))
            await client.until(lambda: exchange.answer.complete)
            answer = exchange.answer
            assert answer.status == (200 if stream else 503)
            assert outcome(answer, route, stream)[1:] == (None, "engine_draining", False)
            assert stream or answer.header("retry-after") == "3"
