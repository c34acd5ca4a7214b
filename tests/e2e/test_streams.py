"""Many streams at once over one connection, alone and together, with the clients people use."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import openai
import pytest

CHAT = "/v1/chat/completions"


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "M", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24, **fields}


def text_of(stream: str) -> str:
    """The joined text of a complete stream."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", stream[-300:]
    chunks = [json.loads(line) for line in lines[:-1]]
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


def test_64_streams_over_one_http2_connection(server: Any) -> None:
    """All finish, each with the text that it has alone."""
    prompts = [f"prompt number {n}" * (1 + n % 5) for n in range(64)]
    with httpx.Client(trust_env=False, timeout=120) as client:
        alone = [
            client.post(server.url + CHAT, json=body(p)).json()["choices"][0]["message"]["content"] for p in prompts
        ]
    streamed: dict[int, str] = {}

    async def run() -> None:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(http1=False, http2=True, limits=limits, trust_env=False, timeout=120) as client:

            async def ask(n: int) -> None:
                reply = await client.post(server.url + CHAT, json=body(prompts[n], stream=True))
                assert reply.http_version == "HTTP/2"
                streamed[n] = text_of(reply.text)

            async with anyio.create_task_group() as tasks:
                for n in range(64):
                    tasks.start_soon(ask, n)

    anyio.run(run)
    assert [streamed[n] for n in range(64)] == alone
    server.wait_idle()


def test_openai_sdk(server: Any) -> None:
    """The official client, sync: whole, streamed, and completions with log-probabilities."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120) as client:
        messages: Any = [{"role": "user", "content": "hello"}]
        options: Any = {"model": "M", "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(messages=messages, **options)
        stream = client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **options
        )
        chunks = list(stream)
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
        )
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
        text = client.completions.create(prompt="abc", logprobs=2, **options)
        assert text.choices[0].logprobs is not None
        assert len(text.choices[0].logprobs.token_logprobs or []) == 12
        assert [m.id for m in client.models.list()] == ["M"]


def test_openai_sdk_async_leaves_in_mid_stream(server: Any) -> None:
    """The async client closes its stream early; the sequence is gone at once."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", timeout=120) as client:
            stream = await client.chat.completions.create(
                model="M", messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=3000
            )
            async for _ in stream:
                break
            await stream.close()

    anyio.run(run)
    server.wait_idle()


@pytest.mark.parametrize("http2", [False, True])
def test_a_prompt_that_never_fits_is_refused_and_holds_up_nobody(start: Any, http2: bool) -> None:
    server = start("--kv-cache-tokens", "256", "--max-num-seqs", "4")
    with httpx.Client(http1=not http2, http2=http2, trust_env=False, timeout=60) as client:
        for prompt in ("a" * 300, "a" * 5000):
            refused = client.post(server.url + CHAT, json=body(prompt))
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "256" in error["message"]
            assert client.post(server.url + CHAT, json=body("hi")).status_code == 200
    server.stop()
