"""API keys from flags and files, and how many requests of one key are served at once."""

from __future__ import annotations

import json

import anyio
import pytest

from aserve.core.config import ServerConfig
from aserve.core.errors import ConfigError
from aserve.server.app import App
from aserve.server.engine_slot import EngineSlot

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"


def bearer(key):
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


def body(**fields):
    return json.dumps({"model": "M", "prompt": "abc", "max_tokens": 400, "ignore_eos": True, **fields}).encode()


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nalpha\n\n  beta  \n")
    return str(file)


async def test_keys_of_a_file_are_added_to_those_of_flags(idle_client, key_file):
    client = idle_client(api_key=("gamma",), api_key_file=key_file)
    for key in ("alpha", "beta", "gamma"):
        assert (await client.get("/version", bearer(key))).status == 200
    for key in ("# of the team", "alp", "alphabeta", ""):
        assert (await client.get("/version", bearer(key))).status == 401
    assert (await client.get("/health")).status == 503, "it is loading, which needs no key to be told"


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), (b"# none\n\n", "holds no key"), (b"\xff\xfe", "cannot be read")],
)
async def test_a_key_file_that_is_none_lets_nobody_start(tmp_path, content, said):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--api-key-file.*{said}"):
        App(EngineSlot(), ServerConfig(api_key_file=str(file)))


async def test_a_byte_order_mark_is_no_part_of_a_key(idle_client, tmp_path):
    file = tmp_path / "keys"
    file.write_bytes("alpha\n".encode("utf-8-sig"))
    assert (await idle_client(api_key_file=str(file)).get("/version", bearer("alpha"))).status == 200


async def test_a_key_that_is_no_text_is_refused_and_not_shown():
    key = b"secret\xff".decode("utf-8", "surrogateescape")
    with pytest.raises(ConfigError, match="UTF-8") as info:
        App(EngineSlot(), ServerConfig(api_key=(key,)))
    assert "secret" not in str(info.value)


async def test_a_limit_per_key_needs_keys():
    with pytest.raises(ConfigError, match="needs --api-key"):
        App(EngineSlot(), ServerConfig(max_requests_per_key=3))


async def test_each_key_has_its_share(serving, make_exchange, gate):
    server = {"api_key": ("a", "b"), "max_requests_per_key": 2}
    async with serving(server=server, gate=gate) as client, anyio.create_task_group() as tasks:
        running = [make_exchange(body(stream=n > 0)) for n in range(2)]
        for exchange in running:
            tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, bearer("a"))
        await client.submitted(2)
        refused = await client.request("POST", COMPLETIONS, body(), bearer("a"))
        assert refused.status == 429
        assert refused.error["type"] == "rate_limit_error"
        assert refused.error["code"] == "concurrency_limit_exceeded"
        assert int(refused.header("retry-after")) >= 1
        assert refused.header("connection") is None, "the connection can be used again"
        other = make_exchange(body(max_tokens=1))
        tasks.start_soon(client.run, other, "POST", COMPLETIONS, bearer("b"))
        await client.submitted(3)
        running[0].disconnect()
        gate.open()
        await client.until(lambda: running[0].answer.complete)
        again = await client.request("POST", COMPLETIONS, body(max_tokens=2), bearer("a"))
        assert again.status == 200
        await client.until(lambda: other.answer.complete)
        running[1].disconnect()


async def test_refused_requests_take_no_share(serving):
    server = {"api_key": ("a",), "max_requests_per_key": 1}
    async with serving(server=server) as client:
        for wrong in (b"{", body(model="N"), body(max_tokens=-1)):
            assert (await client.request("POST", COMPLETIONS, wrong, bearer("a"))).status in (400, 404)
        assert (await client.request("POST", COMPLETIONS, body(max_tokens=2), bearer("a"))).status == 200
