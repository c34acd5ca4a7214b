"""The route table and the rules of every route: methods, paths, keys, origins, request ids, lifespan."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from aserve.core.config import EngineConfig, ModelConfig, ServerConfig
from aserve.core.errors import ConfigError, ModelLoadError
from aserve.server.app import App, create_app
from aserve.server.engine_slot import EngineSlot

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
GET_ROUTES = ["/v1/models", "/v1/models/M", "/v1/models/org/M2", "/health", "/ready", "/metrics", "/version"]


@pytest.mark.parametrize("path", GET_ROUTES)
async def test_get_and_head(serving, path):
    async with serving() as client:
        got = await client.get(path)
        head = await client.request("HEAD", path)
        assert got.status == head.status == 200
        assert got.body
        assert head.body == b""
        assert head.header("content-type") == got.header("content-type")


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", CHAT, 405, "POST, OPTIONS"),
        ("PATCH", CHAT, 405, "POST, OPTIONS"),
        ("BREW", CHAT, 405, "POST, OPTIONS"),
        ("POST", "/v1/models", 405, "GET, HEAD, OPTIONS"),
        ("DELETE", "/health", 405, "GET, HEAD, OPTIONS"),
        ("POST", "/v1/models/M", 405, "GET, HEAD, OPTIONS"),
        ("TRACE", CHAT, 405, "POST, OPTIONS"),
        ("TRACE", "/", 405, "GET, HEAD, OPTIONS"),
        ("GET", "/nope", 404, None),
        ("POST", CHAT + "/", 404, None),
        ("POST", "/" + CHAT, 404, None),
        ("POST", CHAT.upper(), 404, None),
        ("GET", "/v1/models/", 404, None),
        ("GET", "/", 404, None),
        ("GET", "//v1/models", 404, None),
        ("GET", "/health/", 404, None),
        ("GET", "", 404, None),
        ("GET", "/v1/models/other", 404, None),
        ("GET", "/v1/models//M", 404, None),
    ],
)
async def test_wrong_method_or_path(serving, method, path, status, allow):
    async with serving() as client:
        answer = await client.request(method, path, b"{}", {"content-length": "2"})
        assert answer.status == status
        assert answer.header("allow") == allow
        assert answer.header("location") is None
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert answer.error["message"]


@pytest.mark.parametrize("path", ["*", CHAT, "/v1/models", "/nope"])
async def test_options(idle_client, path):
    answer = await idle_client().request("OPTIONS", path)
    assert answer.status == (404 if path == "/nope" else 204)
    assert answer.body == b"" or path == "/nope"


async def test_model_list(serving):
    async with serving() as client:
        entries = (await client.get("/v1/models")).json
        assert entries["object"] == "list"
        assert [e["id"] for e in entries["data"]] == ["M", "org/M2"]
        for entry in entries["data"]:
            assert entry["object"] == "model"
            assert entry["owned_by"] == "aserve"
            assert entry["max_model_len"] == 512
            assert (await client.get(f"/v1/models/{entry['id']}")).json == entry
        missing = await client.get("/v1/models/other")
        assert missing.error["code"] == "model_not_found"


async def test_a_second_name_is_served_and_echoed(serving):
    async with serving() as client:
        answer = await client.chat(model="org/M2", max_tokens=1)
        assert answer.status == 200
        assert answer.json["model"] == "org/M2"


async def test_while_loading(idle_client):
    client = idle_client()
    for path in ("/health", "/ready"):
        answer = await client.get(path)
        assert answer.status == 503
        assert answer.json["status"] == "loading"
    for answer in (await client.get("/v1/models"), await client.chat(), await client.complete()):
        assert answer.status == 503
        assert answer.error["code"] == "engine_loading"
        assert int(answer.header("retry-after")) > 0
    metrics = await client.get("/metrics")
    assert metrics.status == 200
    assert b"aserve_engine_up 0.0" in metrics.body


async def test_after_the_engine_was_closed(serving):
    async with serving() as client:
        pass
    for path in ("/health", "/ready"):
        answer = await client.get(path)
        assert (answer.status, answer.json["status"]) == (503, "closed")
    answer = await client.chat()
    assert (answer.status, answer.error["code"]) == (503, "engine_draining")


async def test_while_draining(serving):
    async with serving() as client:
        client.app.slot.engine.start_draining()
        assert (await client.get("/health")).status == 200
        assert (await client.get("/ready")).json["status"] == "draining"
        answer = await client.chat()
        assert answer.status == 503
        assert answer.error["code"] == "engine_draining"
        assert answer.header("retry-after")


async def test_after_the_engine_died(serving):
    async with serving(fail_at_step=1) as client:
        answer = await client.chat()
        assert answer.status == 503
        assert answer.error["code"] == "engine_dead"
        assert (await client.get("/health")).json["status"] == "dead"
        assert (await client.get("/ready")).status == 503
        assert b"aserve_engine_up 0.0" in (await client.get("/metrics")).body
        assert (await client.complete()).status == 503


async def test_a_step_that_hangs_turns_health_red(serving):
    async with serving(server={"watchdog_s": 0.02}, step_s=0.3) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(client.chat, max_tokens=2))
        with anyio.fail_after(10):
            while (answer := await client.get("/health")).status == 200:
                await anyio.sleep(0.01)
        assert answer.json["status"] == "stalled"


KEYS = ("right-key-123", "second-key-456")


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic abc",
        "Bearer \xff",
        f"Bearer {KEYS[0]}x",
        f"Bearer {KEYS[0][:-1]}",
        KEYS[0],
    ],
)
async def test_bad_key(idle_client, value):
    headers = {"content-type": "application/json"} | ({} if value is None else {"authorization": value})
    client = idle_client(api_key=KEYS)
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nope")):
        answer = await client.request(method, path, b"{}", headers)
        assert answer.status == 401
        assert answer.header("www-authenticate") == "Bearer"
        assert answer.error["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "value", [f"Bearer {KEYS[0]}", f"bearer {KEYS[0]}", f"Bearer {KEYS[1]}", f"BEARER  {KEYS[0]} "]
)
async def test_good_key(serving, value):
    async with serving(server={"api_key": KEYS}) as client:
        assert (await client.get("/v1/models", {"authorization": value})).status == 200


async def test_open_routes_need_no_key(serving):
    async with serving(server={"api_key": KEYS}) as client:
        assert (await client.get("/health")).status == (await client.get("/ready")).status == 200
        assert (await client.request("OPTIONS", CHAT)).status == 204


async def test_differing_authorization_headers(serving, make_exchange):
    async with serving(server={"api_key": KEYS}) as client:
        for first, second, status in [("wrong", KEYS[0], 401), (KEYS[0], KEYS[0], 200), (KEYS[0], KEYS[1], 401)]:
            exchange = make_exchange()
            scope = client.scope("GET", "/v1/models")
            scope["headers"] = [(b"authorization", f"Bearer {k}".encode()) for k in (first, second)]
            await client.app(scope, exchange.receive, exchange.send)
            assert exchange.answer.status == status


async def test_key_in_the_query_does_not_count(idle_client):
    client = idle_client(api_key=KEYS)
    assert (await client.request("GET", "/v1/models", query_string=b"api_key=right-key-123")).status == 401


async def test_keys_and_prompts_are_not_logged(serving, caplog):
    caplog.set_level(logging.DEBUG)
    async with serving(server={"api_key": KEYS}) as client:
        await client.post(
            CHAT,
            {"model": "M", "messages": [{"role": "user", "content": "SECRET"}]},
            {"authorization": "Bearer wrong-secret-789"},
        )
        await client.post(
            CHAT,
            {"model": "M", "max_tokens": 2, "messages": [{"role": "user", "content": "SECRET"}]},
            {"authorization": f"Bearer {KEYS[0]}"},
        )
    assert "SECRET" not in caplog.text
    assert "wrong-secret-789" not in caplog.text
    assert KEYS[0] not in caplog.text


async def test_one_log_line_per_request(serving, caplog):
    caplog.set_level(logging.INFO, logger="aserve")
    async with serving() as client:
        await client.chat(max_tokens=2)
        await client.chat(max_tokens=2, stream=True)
        await client.chat(temperature="hot")
        await client.get("/no\nsuch\x1bpath" + "x" * 500)
        await client.get("/health")
    lines = [r.getMessage() for r in caplog.records if r.name == "aserve.access"]
    assert len(lines) == 4
    assert lines[0].startswith("POST /v1/chat/completions 200 ok 21+2 tokens ")
    assert lines[1].startswith("POST /v1/chat/completions 200 ok 21+2 tokens ")
    assert lines[2].startswith("POST /v1/chat/completions 400 invalid_value ")
    assert lines[3].startswith(r"GET /no\nsuch\x1bpathxxx")
    assert all(len(line) < 300 for line in lines)


async def test_cors(serving):
    origin = {"origin": "https://a.example"}
    preflight = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with serving(server={"cors_origin": ("https://a.example",), "api_key": KEYS}) as client:
        answer = await client.request("OPTIONS", CHAT, headers=preflight)
        assert answer.status == 204
        assert answer.header("access-control-allow-origin") == "https://a.example"
        assert answer.header("access-control-allow-headers") == "authorization"
        assert "POST" in answer.header("access-control-allow-methods")
        for got in (
            await client.get("/health", origin),
            await client.get("/v1/models", origin),
            await client.post(CHAT, b"{}", origin),
        ):
            assert got.header("access-control-allow-origin") == "https://a.example"
            assert got.header("vary") == "Origin"
        stranger = await client.request("OPTIONS", CHAT, headers={**preflight, "origin": "https://b.example"})
        assert stranger.header("access-control-allow-origin") is None
    async with serving(server={"cors_origin": ("*",)}) as client:
        answer = await client.post(CHAT, b'{"stream": true}', {"origin": "https://b.example"})
        assert answer.header("access-control-allow-origin") == "*"
    async with serving() as client:
        answer = await client.request("OPTIONS", CHAT, headers=preflight)
        assert answer.status == 204
        assert answer.header("access-control-allow-origin") is None


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("abc-123", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a b", False),
        ("a\x00", False),
        ("\xe9", False),
        ("", False),
    ],
)
async def test_request_id(serving, given, echoed):
    async with serving() as client:
        for answer in (
            await client.get("/health", {"x-request-id": given}),
            await client.post(CHAT, b"{}", {"x-request-id": given}),
        ):
            assert (answer.header("x-request-id") == given) is echoed
            assert len(answer.header("x-request-id")) > 0


@pytest.mark.parametrize("path", ["/llm/v1/models", "/v1/models"])
async def test_root_path(serving, path):
    """Mounted in another program: hosts differ in whether the path has the prefix."""
    async with serving() as client:
        assert (await client.request("GET", path, root_path="/llm")).status == 200
        assert (await client.request("GET", path, root_path="/llm/")).status == 200
        assert (await client.request("GET", "/llmx/v1/models", root_path="/llm")).status == 404


async def test_websockets_are_refused(idle_client, make_exchange):
    exchange = make_exchange()
    exchange.push({"type": "websocket.connect"})
    sent = []

    async def send(message):
        sent.append(message)

    await idle_client().app({"type": "websocket", "path": CHAT, "headers": []}, exchange.receive, send)
    assert [m["type"] for m in sent] == ["websocket.close"]


# -- lifespan and construction ---------------------------------------------------------------------------------------


async def run_lifespan(app, make_exchange, during):
    exchange, sent = make_exchange(chunks=[]), []
    exchange.push({"type": "lifespan.startup"})

    async def send(message):
        sent.append(message["type"])
        if message["type"] == "lifespan.startup.complete":
            await during()
            exchange.push({"type": "lifespan.shutdown"})

    await app({"type": "lifespan"}, exchange.receive, send)
    return sent


async def test_a_given_engine_stays_the_callers(serving, make_exchange):
    async with serving() as client:
        engine = client.app.slot.engine
        app = create_app(engine=engine)

        async def during():
            assert app.slot.engine is engine

        sent = await run_lifespan(app, make_exchange, during)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert engine.status == "running"


async def test_an_app_for_a_slot_has_an_empty_lifespan(make_exchange):
    sent = await run_lifespan(App(EngineSlot(), ServerConfig()), make_exchange, anyio.lowlevel.checkpoint)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_configuration_is_opened_by_the_lifespan(serving, make_exchange, monkeypatch):
    opened = []

    @asynccontextmanager
    async def open_engine(config):
        async with serving() as client:
            opened.append(config)
            yield client.app.slot.engine
        opened.append("closed")

    monkeypatch.setattr("aserve.assembly.open_engine", open_engine)
    config = EngineConfig(model=ModelConfig(model="x"))
    app = create_app(config)

    async def during():
        assert opened == [config]
        assert app.slot.engine.status == "running"

    sent = await run_lifespan(app, make_exchange, during)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert opened == [config, "closed"]
    assert app.slot.engine is None


async def test_an_engine_that_cannot_be_opened_fails_the_start(make_exchange, monkeypatch):
    @asynccontextmanager
    async def open_engine(config):
        raise ModelLoadError("there is no model x")
        yield

    monkeypatch.setattr("aserve.assembly.open_engine", open_engine)
    app = create_app(EngineConfig(model=ModelConfig(model="x")))
    sent = await run_lifespan(app, make_exchange, anyio.lowlevel.checkpoint)
    assert sent == ["lifespan.startup.failed"]


@pytest.mark.parametrize("error", [ZeroDivisionError("a fault"), ExceptionGroup("x", [MemoryError("no room")])])
async def test_a_fault_while_loading_fails_the_start_too(make_exchange, monkeypatch, caplog, error):
    """A host that sees an exception instead goes on without a lifespan, and would answer "loading" for ever."""

    @asynccontextmanager
    async def open_engine(config):
        raise error
        yield

    monkeypatch.setattr("aserve.assembly.open_engine", open_engine)
    app = create_app(EngineConfig(model=ModelConfig(model="x")))
    exchange, sent = make_exchange(chunks=[{}]), []

    async def send(message):
        sent.append(message)

    await app({"type": "lifespan"}, exchange.receive, send)
    assert [m["type"] for m in sent] == ["lifespan.startup.failed"]
    last = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
    assert str(last) in sent[0]["message"]
    assert "\n" not in sent[0]["message"]
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert record.exc_info


async def test_configuration_or_engine():
    config = EngineConfig(model=ModelConfig(model="x"))
    with pytest.raises(ConfigError):
        create_app()
    assert isinstance(create_app(config), App)


FIELDS = {
    "/v1/completions": {"model": "M", "prompt": "hi", "max_tokens": 3},
    CHAT: {"model": "M", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}


@pytest.mark.parametrize("path", FIELDS)
async def test_a_field_that_nobody_knows(serving, caplog, path):
    """Refused by name, unless the server is told otherwise; one that asks for what is not offered always is."""
    body = {**FIELDS[path], "no_such_field": 1}
    async with serving() as client:
        refused = await client.post(path, body)
        assert (refused.status, refused.error["param"]) == (400, "no_such_field")
    for policy, num_lines in (("ignore", 0), ("warn", 1)):
        caplog.clear()
        async with serving(server={"unknown_fields": policy}) as client:
            assert (await client.post(path, body)).status == 200
            assert (await client.post(path, {**body, "mirostat": 2})).error["param"] == "mirostat"
            assert (await client.post(path, {**body, "temperature": "hot"})).error["param"] == "temperature"
        lines = [r.getMessage() for r in caplog.records if "no_such_field" in r.getMessage()]
        assert bool(lines) == bool(num_lines)
