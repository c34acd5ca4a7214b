"""Clients that leave, at every moment and on both kinds of answer: nothing stays behind."""

from __future__ import annotations

import json
import random
from functools import partial

import anyio
import pytest

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


def body(**fields):
    return json.dumps({"model": "M", "prompt": "abc", "max_tokens": 400, "ignore_eos": True, **fields}).encode()


@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"prompt": ["a", "b", "c"]}], ids=["one", "n4", "prompts"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["at_once", "queued", "running"])
async def test_leaving(serving, make_exchange, fields, stream, moment):
    async with serving(step_s=0.002, max_num_seqs=4) as client, anyio.create_task_group() as tasks:
        engine = client.app.slot.engine
        blockers = []
        if moment == "queued":
            for _ in range(4):
                blockers.append(make_exchange(body()))
                tasks.start_soon(client.run, blockers[-1], "POST", COMPLETIONS, JSON)
            with anyio.fail_after(10):
                while engine.stats().num_running < 4:
                    await anyio.sleep(0.002)
        exchange = make_exchange(body(stream=stream, **fields))
        if moment == "at_once":
            exchange.disconnect()
        tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, JSON)
        if moment != "at_once":
            gauge = "num_waiting" if moment == "queued" else "num_running"
            with anyio.fail_after(10):
                while not getattr(engine.stats(), gauge):
                    await anyio.sleep(0.002)
            exchange.disconnect()
        for blocker in blockers:
            await anyio.sleep(0.01)
            blocker.disconnect()
        await client.settled()
    assert "[DONE]" not in exchange.answer.body.decode()
    assert engine.stats().num_used_blocks == 0
    if not exchange.answer.complete:
        assert exchange.answer.status == 200  # a stream that had begun is just left
    else:
        assert exchange.answer.status in (499, 200)


async def test_leaving_while_sending_the_body(serving, make_exchange):
    async with serving() as client:
        exchange = make_exchange(chunks=[])
        exchange.push({"type": "http.request", "body": b'{"model"', "more_body": True})
        exchange.disconnect()
        await client.run(exchange, "POST", CHAT, JSON)
        assert exchange.answer.status == 499


async def test_the_cache_is_free_before_the_last_bytes_are_sent(serving, make_exchange):
    seen = []

    async def look(exchange, message):
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await client.settled()
            seen.append(True)

    async with serving() as client:
        for stream in (False, True):
            exchange = make_exchange(body(max_tokens=5, stream=stream), on_send=look)
            await client.run(exchange, "POST", COMPLETIONS, JSON)
    assert len(seen) == 2


async def test_a_slow_reader_stops_nobody(serving, make_exchange):
    gate = anyio.Event()

    async def wait(exchange, message):
        if message.get("body"):
            await gate.wait()

    async with serving() as client, anyio.create_task_group() as tasks:
        slow = make_exchange(body(max_tokens=50, stream=True), on_send=wait)
        tasks.start_soon(client.run, slow, "POST", COMPLETIONS, JSON)
        assert (await client.complete(max_tokens=100)).status == 200
        gate.set()
        await slow.wait_for(lambda answer: answer.complete)
    assert len(slow.answer.chunks) >= 2
    assert slow.answer.text() != ""


async def test_a_client_that_does_not_read_loses_its_request(serving, make_exchange):
    async def stick(exchange, message):
        if message.get("body"):
            await anyio.sleep_forever()

    async with serving(server={"stall_timeout_s": 0.05}) as client:
        exchange = make_exchange(body(stream=True), on_send=stick)
        await client.run(exchange, "POST", COMPLETIONS, JSON)
        assert not exchange.answer.complete
        await client.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("who", ["server", "client"])
async def test_the_time_limit(serving, who, stream):
    server = {"request_timeout_s": 0.1} if who == "server" else {}
    headers = {**JSON, **({} if who == "server" else {"x-request-timeout": "0.1"})}
    async with serving(server=server, step_s=0.01) as client:
        answer = await client.request("POST", COMPLETIONS, body(stream=stream), headers)
        assert answer.status == (200 if stream else 504)
        error = json.loads(answer.data[-1])["error"] if stream else answer.error
        assert error["code"] == "deadline_exceeded"
        await client.settled()


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
async def test_a_time_limit_that_is_none(idle_client, serving, value):
    async with serving() as client:
        answer = await client.post(COMPLETIONS, body(), {"x-request-timeout": value})
        assert answer.status == 400


async def test_server_shutdown_under_running_requests(serving, make_exchange):
    """The server's own cancellation: requests end, no send is cut."""
    async with serving(step_s=0.005) as client:
        exchanges = [make_exchange(body(stream=n % 2 == 0)) for n in range(6)]
        async with anyio.create_task_group() as tasks:
            for exchange in exchanges:
                tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, JSON)
            await exchanges[0].wait_for(lambda answer: answer.num_sends > 4)
            tasks.cancel_scope.cancel()
        await client.settled()


async def test_engine_shutdown_under_running_requests(serving, make_exchange):
    exchanges = [make_exchange(body(stream=n % 2 == 0)) for n in range(6)]
    async with anyio.create_task_group() as tasks:
        async with serving(step_s=0.005) as client:
            for exchange in exchanges:
                tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, JSON)
            await exchanges[0].wait_for(lambda answer: answer.num_sends > 4)
        for exchange in exchanges:
            await exchange.wait_for(lambda answer: answer.complete)
    for n, exchange in enumerate(exchanges):
        error = json.loads(exchange.answer.data[-1])["error"] if n % 2 == 0 else exchange.answer.error
        assert error["code"] == "engine_draining"


async def test_a_storm_of_random_disconnects(serving, make_exchange):
    rng = random.Random(7)
    async with serving(max_queue=1000, step_s=0.0005) as client:

        async def one(n):
            exchange = make_exchange(
                body(
                    stream=rng.random() < 0.5,
                    n=rng.choice([1, 1, 3]),
                    max_tokens=rng.choice([1, 5, 60]),
                    prompt=rng.choice(["a" * rng.randint(1, 90), ["x", "yz"]]),
                    logprobs=rng.choice([None, 1]),
                )
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, JSON)
                await anyio.sleep(rng.choice([0, 0.001, 0.01, 0.05]))
                if rng.random() < 0.7:
                    exchange.disconnect()

        async with anyio.create_task_group() as tasks:
            for n in range(150):
                tasks.start_soon(partial(one, n))
                if n % 10 == 0:
                    await anyio.sleep(0.005)
        await client.settled()
        stats = client.app.slot.engine.stats()
        assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
        assert b"aserve_http_active_requests 0.0" in (await client.get("/metrics")).body
