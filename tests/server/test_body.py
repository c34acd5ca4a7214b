"""Bodies: limits in size and time, content types, answers given before the body has come."""

from __future__ import annotations

import gzip
import json

import anyio
import pytest
from trio.testing import MockClock

from aserve.core.errors import GenerationClosedError, PayloadTooLargeError, RequestTimeoutError
from aserve.server.asgi import RequestHead
from aserve.server.body import RequestBody

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
GOOD = json.dumps({"model": "M", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}).encode()


def head(**headers):
    return RequestHead(
        method="POST",
        path=CHAT,
        http_version="1.1",
        request_id="r",
        headers=[(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
    )


@pytest.mark.parametrize(
    "kind",
    [
        "application/x-www-form-urlencoded",
        "text/plain",
        "",
        "multipart/form-data; boundary=x",
        "application/json; charset=latin1",
        "application/jsonx",
        None,
    ],
)
async def test_wrong_content_type(serving, kind):
    async with serving() as client:
        answer = await client.request("POST", CHAT, GOOD, {} if kind is None else {"content-type": kind})
        assert answer.status == 415
        assert answer.error["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON; charset=UTF-8",
        "application/json;charset=utf-8",
        'application/json; charset="utf-8"',
        "application/json; x=y",
    ],
)
async def test_good_content_type(serving, kind):
    async with serving() as client:
        assert (await client.request("POST", CHAT, GOOD, {"content-type": kind})).status == 200


async def test_compressed_bodies_are_refused(serving):
    async with serving() as client:
        answer = await client.post(CHAT, gzip.compress(GOOD), {"content-encoding": "gzip"})
        assert answer.status == 415
        assert (await client.post(CHAT, GOOD, {"content-encoding": "identity"})).status == 200


async def test_a_body_in_pieces(serving):
    async with serving() as client:
        pieces = [GOOD[i : i + 7] for i in range(0, len(GOOD), 7)]
        assert (await client.post(CHAT, b"", chunks=pieces)).status == 200


async def test_too_large_by_its_length(serving):
    """Refused before it is read: the answer is out while the client still sends."""
    async with serving(server={"max_body_bytes": 1000}) as client:
        chunks = [b"x" * 500] * 10
        answer = await client.post(CHAT, b"", {"content-length": "5000"}, chunks=chunks)
        assert answer.status == 413
        assert answer.error["code"] == "request_too_large"
        assert "1000" in answer.error["message"]
        assert answer.header("connection") == "close"


async def test_too_large_as_it_comes(serving):
    async with serving(server={"max_body_bytes": 1000}) as client:
        assert (await client.post(CHAT, b"", chunks=[b" " * 400] * 4)).status == 413
        assert (await client.post(CHAT, GOOD + b" " * (1000 - len(GOOD)))).status == 200


@pytest.mark.parametrize("length", ["abc", "-5", "1e3", ""])
async def test_a_length_that_is_no_number(serving, length):
    async with serving() as client:
        assert (await client.post(CHAT, GOOD, {"content-length": length})).status == 400
        assert (await client.post(CHAT, GOOD, {"content-length": "9" * 30})).status == 413


async def test_a_bad_key_is_answered_before_the_body(idle_client, make_exchange):
    exchange = make_exchange(chunks=[])
    client = idle_client(api_key=("k",))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.run, exchange, "POST", CHAT, {"content-length": "100000000"})
        await exchange.wait_for(lambda answer: answer.body)
        assert exchange.answer.status == 401
        assert not exchange.answer.complete
        exchange.push({"type": "http.request", "body": b"x" * 1000, "more_body": True})
        exchange.push({"type": "http.request", "body": b"x" * 1000, "more_body": False})
    assert exchange.answer.complete


async def test_an_early_answer_is_not_cut_by_a_cancellation_from_outside(idle_client, make_exchange):
    cut = []

    async def slow(exchange, message):
        try:
            await anyio.sleep(0.05)
        except BaseException as error:
            cut.append(error)
            raise

    exchange = make_exchange(on_send=slow)
    with anyio.move_on_after(0.02):
        await idle_client(api_key=("k",)).run(exchange, "GET", "/v1/models")
    assert exchange.answer.complete
    assert exchange.bookkeeping_done
    assert not cut


async def test_http2_answers_do_not_name_the_connection(idle_client, make_exchange):
    exchange = make_exchange(chunks=[b"x", b""])
    await idle_client(api_key=("k",)).run(exchange, "POST", CHAT, http_version="2")
    assert exchange.answer.status == 401
    assert exchange.answer.header("connection") is None


@pytest.mark.parametrize("size", [300_000, 5_000_000])
async def test_large_bodies_do_not_stop_others(serving, size):
    """Parsed in a thread: the answer to another request comes meanwhile."""
    large = json.dumps({"model": "M", "messages": [{"role": "user", "content": "a b c " * (size // 6)}]}).encode()
    async with serving() as client, anyio.create_task_group() as tasks:
        statuses = []

        async def upload():
            statuses.append((await client.post(CHAT, large)).status)

        for _ in range(3):
            tasks.start_soon(upload)
        assert (await client.chat(max_tokens=2)).status == 200
    assert statuses == [400] * 3


# -- in virtual time ---------------------------------------------------------------------------------------------------


@pytest.fixture
def virtual():
    return MockClock(autojump_threshold=0)


def feed(pieces):
    """``receive`` that gives (delay, bytes, more) one after the other."""
    items = iter(pieces)

    async def receive():
        delay, data, more = next(items)
        await anyio.sleep(delay)
        return {"type": "http.request", "body": data, "more_body": more}

    return receive


def run_virtual(main, clock):
    return anyio.run(main, backend="trio", backend_options={"clock": clock})


def test_trickled_bytes_do_not_keep_a_body_open(virtual):
    async def main():
        body = RequestBody(head(), feed((1.0, b"x", True) for _ in range(10**6)), max_bytes=10**6, timeout_s=30.0)
        with pytest.raises(RequestTimeoutError):
            await body.read()
        assert 29 < anyio.current_time() < 32

    run_virtual(main, virtual)


def test_a_large_body_on_a_slow_link_has_its_time(virtual):
    async def main():
        pieces = [(0.9, b"x" * 65536, n < 99) for n in range(100)]
        body = RequestBody(head(), feed(pieces), max_bytes=10**8, timeout_s=10.0)
        assert len(await body.read()) == 100 * 65536
        assert body.complete

    run_virtual(main, virtual)


async def test_leaving_and_too_large_are_told_apart():
    async def gone():
        return {"type": "http.disconnect"}

    with pytest.raises(GenerationClosedError):
        await RequestBody(head(), gone, max_bytes=10, timeout_s=1.0).read()
    with pytest.raises(PayloadTooLargeError):
        await RequestBody(head(content_length="11"), gone, max_bytes=10, timeout_s=1.0).read()


def test_a_body_that_never_ends_is_drained_for_a_while_only(virtual, idle_client, make_exchange):
    """After 401 the upload goes on for ever: it is cut, after the answer."""

    async def main():
        exchange = make_exchange(chunks=[])

        async def receive():
            await anyio.sleep(0.1)
            return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

        client = idle_client(api_key=("k",))
        await client.app(client.scope("POST", CHAT, {"content-length": "1000000000"}), receive, exchange.send)
        assert exchange.answer.status == 401
        assert exchange.answer.complete
        assert 4 < anyio.current_time() < 7

    run_virtual(main, virtual)
