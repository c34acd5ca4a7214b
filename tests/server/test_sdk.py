"""The official client against real servers: uvicorn on asyncio, hypercorn on trio, over sockets."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import anyio
import openai
import pydantic
import pytest
import trio
import uvicorn
from hypercorn.config import Config
from hypercorn.trio import serve as hypercorn_serve

from aserve.testing import hash_letter

USER = [{"role": "user", "content": "hi"}]


class _Uvicorn:
    backend = "asyncio"

    def __init__(self, app, sock):
        self._sock = sock
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=3)
        self._server = uvicorn.Server(config)

    async def run(self):
        self._server.install_signal_handlers = lambda: None
        await self._server.serve(sockets=[self._sock])

    def stop(self):
        self._server.should_exit = True


class _Hypercorn:
    backend = "trio"

    def __init__(self, app, sock):
        self._app = app
        self._config = Config()
        self._config.bind = [f"fd://{sock.detach()}"]  # hypercorn closes it
        self._config.graceful_timeout = 3
        self._stop = trio.Event()
        self._token = None

    async def run(self):
        self._token = trio.lowlevel.current_trio_token()
        await hypercorn_serve(self._app, self._config, shutdown_trigger=self._stop.wait, mode="asgi")

    def stop(self):
        self._token.run_sync_soon(self._stop.set)


@contextmanager
def running(kind, serving, **options):
    """A server in a thread of its own; yields its base URL."""
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    servers = []
    ready = threading.Event()

    async def main():
        async with serving(**options) as client:
            servers.append(kind(client.app, sock))
            ready.set()
            await servers[0].run()

    thread = threading.Thread(target=lambda: anyio.run(main, backend=kind.backend), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        servers[0].stop()
        thread.join(20)
        sock.close()
        assert not thread.is_alive()


@pytest.fixture(params=[_Uvicorn, _Hypercorn], ids=["uvicorn", "hypercorn"])
def url(request, serving):
    with running(request.param, serving) as base:
        yield base


@pytest.fixture
def sdk(url):
    with openai.OpenAI(base_url=url, api_key="x", timeout=20, max_retries=0) as client:
        yield client


def test_chat(sdk):
    whole = sdk.chat.completions.create(model="M", messages=USER, temperature=0, max_tokens=8, n=2)
    assert [c.finish_reason for c in whole.choices] == ["length"] * 2
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert whole._request_id
    texts = ["", ""]
    usages = []
    with sdk.chat.completions.create(
        model="M", messages=USER, temperature=0, max_tokens=8, n=2, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]
    assert usages[0].completion_tokens == 16


def test_chat_logprobs(sdk):
    whole = sdk.chat.completions.create(
        model="M", messages=USER, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = whole.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [2] * 3
    assert "".join(entry.token for entry in content) == whole.choices[0].message.content


def says_hello(tokens, seed):
    """A model that answers the question ``hi``, whose prompt has 21 tokens."""
    return [*b"hello", 257][len(tokens) - 21]


@pytest.mark.parametrize("kind", [_Uvicorn, _Hypercorn])
def test_the_streaming_helper(serving, kind):
    with (
        running(kind, serving, next_token=says_hello) as base,
        openai.OpenAI(base_url=base, api_key="x", timeout=20, max_retries=0) as client,
        client.chat.completions.stream(model="M", messages=USER) as stream,
    ):
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content == "hello"
    assert final.choices[0].finish_reason == "stop"


def test_completions(sdk):
    whole = sdk.completions.create(model="M", prompt=["ab", "cd"], temperature=0, max_tokens=5, logprobs=1)
    assert [c.index for c in whole.choices] == [0, 1]
    assert len(whole.choices[0].logprobs.tokens) == 5
    stream = sdk.completions.create(model="M", prompt=["ab", "cd"], temperature=0, max_tokens=5, stream=True)
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in whole.choices]


def test_models(sdk):
    assert [m.id for m in sdk.models.list()] == ["M", "org/M2"]
    assert sdk.models.retrieve("M").owned_by == "aserve"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other")


def test_errors(sdk):
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="M", messages=USER, temperature=3)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="other", messages=USER)


@pytest.mark.parametrize("kind", [_Uvicorn, _Hypercorn])
def test_an_error_in_mid_stream(serving, kind):
    with (
        running(kind, serving, fail_at_step=8) as base,
        openai.OpenAI(base_url=base, api_key="x", timeout=20, max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model="M", messages=USER, max_tokens=50, stream=True)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "engine_dead"


def test_leaving_a_stream(url, sdk):
    stream = sdk.chat.completions.create(model="M", messages=USER, max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    assert sdk.chat.completions.create(model="M", messages=USER, max_tokens=2).usage.completion_tokens == 2


async def _many(url, count):
    async with openai.AsyncOpenAI(base_url=url, api_key="x", timeout=30, max_retries=0) as client:
        texts = [""] * count

        async def one(n):
            messages = [{"role": "user", "content": f"question {n}"}]
            async for chunk in await client.chat.completions.create(
                model="M", messages=messages, temperature=0, max_tokens=12, stream=True
            ):
                texts[n] += chunk.choices[0].delta.content or ""

        async with anyio.create_task_group() as tasks:
            for n in range(count):
                tasks.start_soon(one, n)
        return texts


def test_many_streams_of_the_async_client(url, sdk):
    texts = anyio.run(_many, url, 24)
    for n in (0, 11, 23):
        alone = sdk.chat.completions.create(
            model="M", messages=[{"role": "user", "content": f"question {n}"}], temperature=0, max_tokens=12
        )
        assert alone.choices[0].message.content == texts[n]


class Person(pydantic.BaseModel):
    name: str
    age: int
    tags: list[str]


def compact(tokens, seed):
    """A model that often wants to close something."""
    return b'"""]}}0a:,'[hash_letter(tokens, seed) % 10]


def test_a_model_of_pydantic_is_what_comes_back(serving):
    with (
        running(_Hypercorn, serving, next_token=compact) as url,
        openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client,
    ):
        asked = {"model": "M", "messages": USER, "response_format": Person, "max_tokens": 200}
        choice = client.chat.completions.parse(**asked).choices[0]
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Person)
        with client.chat.completions.stream(**asked) as stream:
            for event in stream:
                assert event.type
            assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            client.chat.completions.create(
                model="M", messages=USER, extra_body={"guided_json": {"type": "array", "uniqueItems": True}}
            )
