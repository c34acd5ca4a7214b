"""Host headers: a server on a loopback address is not reached under a name of the internet."""

from __future__ import annotations

import pytest

from aserve.core.config import ServerConfig
from aserve.core.errors import ConfigError
from aserve.server.app import App
from aserve.server.engine_slot import EngineSlot

pytestmark = pytest.mark.anyio

LOCAL = ["127.0.0.1", "127.0.0.1:8000", "127.3.2.1", "localhost", "LOCALHOST:80", "[::1]", "[::1]:8000", "gpu-box:8000"]
LOCAL += ["[::ffff:127.0.0.1]", "[::ffff:127.0.0.1]:8000", "[::1]:"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example.",
    "192.0.2.7",
    "[2001:db8::1]:80",
    "::2",
    "[::1]evil.example",
    "[::1]evil.example:8000",
    "[::1].evil.example",
    "[::1]:80.evil.example",
    "[::1",
    "[::ffff:192.0.2.7]",
]


@pytest.fixture
def client(idle_client):
    def make(*, owns_listener=True, **server):
        client = idle_client()
        client.app = App(EngineSlot(), ServerConfig(**server), owns_listener=owns_listener)
        return client

    return make


async def status(client, host, path="/version"):
    return (await client.get(path, {} if host is None else {"host": host})).status


@pytest.mark.parametrize("listen", ["127.0.0.1", "::1", "[::1]", "localhost"])
async def test_on_loopback_only_local_names_are_served(client, listen):
    served = client(host=listen)
    for host in [*LOCAL, None]:
        assert await status(served, host) == 200, host
    for host in FOREIGN:
        answer = await served.get("/version", {"host": host})
        assert answer.status == 403, host
        assert answer.error["code"] == "host_not_allowed"
        assert "--allowed-host" in answer.error["message"]
        assert answer.header("access-control-allow-origin") is None


async def test_every_route_but_health_is_guarded(client):
    served = client()
    for path in ("/v1/models", "/metrics", "/v1/chat/completions", "/none"):
        assert await status(served, "evil.example", path) == 403
    for path in ("/health", "/ready"):
        assert await status(served, "evil.example", path) == 503, "loading"
    assert (await served.request("OPTIONS", "/v1/models", headers={"host": "evil.example"})).status == 403


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", "192.0.2.1"])
async def test_elsewhere_any_name_is_served(client, listen):
    for host in [*LOCAL, *FOREIGN]:
        assert await status(client(host=listen), host) == 200


async def test_names_that_are_allowed(client):
    served = client(allowed_host=("llm.example", "*.lab.example:9000"))
    for host in ("llm.example", "LLM.example:8443", "a.lab.example", "b.a.lab.example:1", "localhost"):
        assert await status(served, host) == 200, host
    for host in ("xllm.example", "lab.example", "evillab.example", "evil.example"):
        assert await status(served, host) == 403, host
    assert await status(client(allowed_host=("*",)), "evil.example") == 200
    assert await status(client(host="0.0.0.0", allowed_host=("llm.example",)), "evil.example") == 403


@pytest.mark.parametrize(
    "rule",
    ["", " ", "*.", "*.*", "a.*", ".example.com", "https://llm.example", "llm.example/", "a b", "[::1", "ü.example"],
)
async def test_rules_that_could_not_mean_what_they_say_are_refused(rule):
    with pytest.raises(ConfigError, match="--allowed-host"):
        ServerConfig(allowed_host=(rule,))


@pytest.mark.parametrize(
    "rule", ["*", "llm", "LLM.example.", "*.example:80", "192.0.2.7:80", "::1", "[2001:db8::1]:80"]
)
async def test_rules_of_every_kind(rule):
    assert ServerConfig(allowed_host=(rule,)).allowed_host == (rule,)


async def test_an_embedding_program_listens_by_itself(client):
    assert await status(client(owns_listener=False), "any.example") == 200
    assert await status(client(owns_listener=False, allowed_host=("a.example",)), "any.example") == 403
