"""The served description of the interface: complete, valid, and in step with what is accepted."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import jsonschema
import pytest

from aserve.server.small_routes import SMALL_ROUTES
from tests.e2e.fake_server import FakeServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


async def document(client):
    answer = await client.get("/openapi.json")
    assert answer.status == 200
    assert answer.header("content-type") == "application/json"
    return answer.json


@pytest.mark.anyio
async def test_every_route_is_in_it(serving, idle_client):
    async with serving() as client:
        paths = (await document(client))["paths"]
        assert set(paths) == {*client.app.post_routes, "/v1/models/{model}", *SMALL_ROUTES}
    loading = await document(idle_client())
    assert "enum" not in loading["components"]["schemas"]["ChatRequest"]["properties"]["model"]


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_as_they_are(serving, idle_client, path):
    """Neither a key nor a host is asked for, and a red one is no error object."""
    async with serving() as client:
        described = (await document(client))["paths"][path]["get"]
        assert set(described["responses"]) == {"200", "503"} and described["security"] == []
        for answer in (await client.get(path), await idle_client().get(path)):
            schema = described["responses"][str(answer.status)]["content"]["application/json"]["schema"]
            jsonschema.validate(answer.json, schema)
            assert set(answer.json) <= set(schema["properties"])


@pytest.mark.anyio
async def test_a_page_for_people_that_loads_nothing_from_elsewhere(serving, idle_client):
    """Also while the model loads, and without a key; what its policy allows is its own script and this server."""
    async with serving(server={"api_key": ("secret",)}) as client:
        answers = [await client.get("/docs"), await idle_client().get("/docs")]
    for answer in answers:
        assert (answer.status, answer.header("content-type")) == (200, "text/html; charset=utf-8")
        page, policy = answer.body.decode(), answer.header("content-security-policy")
        script = re.fullmatch(r".*<script>(.*)</script>.*", page, re.DOTALL).group(1)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}';" in policy and "default-src 'none'" in policy
        assert not re.search(r"https?://|<link|src=|innerHTML", page)


def schema_of(described, name):
    return {"$ref": f"#/components/schemas/{name}", "components": described["components"]}


GOOD = [
    (CHAT, {"messages": [USER], "stop": "x", "logit_bias": {"5": 1.5}, "seed": 2**64 - 1, "tools": [], "user": "u"}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "temperature": None}),
    (CHAT, {"messages": [USER, {"role": "assistant", "refusal": "no"}, USER], "response_format": {"type": "text"}}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "best_of": 1, "logprobs": 3, "stream": True, "stream_options": {}}),
    (COMPLETIONS, {"prompt": ["a", "b"], "parallel_tool_calls": True, "echo": False}),
]
BAD = [
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "alien", "content": "x"}]}),
    (CHAT, {"messages": [USER], "model": "other"}),
    (CHAT, {"messages": [USER], "temperature": 2.1}),
    (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}),
    (CHAT, {"messages": [USER], "unheard_of": 1}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (COMPLETIONS, {"prompt": 5}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}),
    (COMPLETIONS, {"prompt": "a", "n": 0}),
    (COMPLETIONS, {}),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("route", "fields", "good"), [(*c, True) for c in GOOD] + [(*c, False) for c in BAD])
async def test_it_says_what_the_server_does(serving, route, fields, good):
    async with serving() as client:
        described = await document(client)
        body = {"model": "M", "max_tokens": 2, **fields}
        name = "ChatRequest" if route == CHAT else "CompletionRequest"
        validator = jsonschema.Draft202012Validator(schema_of(described, name))
        assert validator.is_valid(body) == good
        assert ((await client.post(route, body)).status == 200) == good


CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
PER_ROUTE = 2500


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3600)
def test_generated_requests_meet_no_fault(tmp_path: Path) -> None:
    """5,000 requests made from the document, right and wrong ones; none is answered with a 5xx."""
    options = {"step_s": 0.0, "capacity": {"max_model_len": 64, "num_blocks": 64}, "server": {"log_level": "warning"}}
    report = tmp_path / "report.xml"
    with FakeServer(tmp_path / "log", **options) as server:
        url = f"http://127.0.0.1:{server.port}"
        described = httpx.get(f"{url}/openapi.json", trust_env=False).json()
        # a time limit of a microsecond is rightly answered with 504
        for path in [path for path in described["paths"] if "post" in described["paths"][path]]:
            operation = described["paths"][path]["post"]
            operation["parameters"] = [p for p in operation["parameters"] if not p["name"].endswith("-Timeout")]
        file = tmp_path / "openapi.json"
        file.write_text(json.dumps(described))
        flags = ["--checks", CHECKS, "--max-examples", str(PER_ROUTE), "--phases", "fuzzing", "--seed", "1"]
        flags += ["--generation-database", "none", "--suppress-health-check", "all", "--no-color"]
        flags += ["--report-junit-path", str(report), "--continue-on-failure"]
        command = [sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", url, *flags]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=3500, check=False)
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
        told = server.output
        assert "WARNING" not in told and "ERROR" not in told and "Traceback" not in told, told[-3000:]
    generated = int(ran.stdout.rpartition(" generated")[0].split()[-1].replace(",", ""))
    assert generated >= 2 * PER_ROUTE * 0.8, ran.stdout[-1500:]
