"""``/metrics``: names, values, and that clients cannot make series."""

from __future__ import annotations

import random
import re
import string

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aserve.core.memory import MemoryUse

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.M)


async def series(client):
    return (await client.get("/metrics")).body.decode()


def totals(text):
    found = {}
    for name, value in SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


async def test_the_text_is_well_formed(serving):
    async with serving() as client:
        await client.chat(max_tokens=3)
        answer = await client.get("/metrics")
        assert answer.header("content-type").startswith("text/plain; version=0.0.4")
        families = {f.name: f for f in text_string_to_metric_families(answer.body.decode())}
        for name in (
            "aserve_num_requests_running",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:prompt_tokens",
            "vllm:generation_tokens",
            "vllm:time_to_first_token_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:e2e_request_latency_seconds",
            "vllm:request_success",
            "aserve_http_requests",
        ):
            assert name in families


async def test_the_numbers_are_right(serving):
    async with serving() as client:
        before = totals(await series(client))
        await client.chat("abc", max_tokens=3, n=2)
        await client.settled()
        got = totals(await series(client))
        for prefix in ("aserve_", "vllm:"):
            assert got[prefix + "num_requests_running"] == got[prefix + "num_requests_waiting"] == 0
            assert got[prefix + "kv_cache_usage_perc"] == before[prefix + "kv_cache_usage_perc"] == 0
            assert got[prefix + "generation_tokens_total"] == 6
            assert got[prefix + "prompt_tokens_total"] == 22
        assert got["aserve_time_to_first_token_seconds_count"] == 1
        assert got["vllm:request_success_total"] == 1


async def test_the_numbers_of_the_start_are_there(serving):
    memory = MemoryUse(
        device="a GPU", on_gpu=True, total=1000, others=10, weights=400, activations=50, graphs=7, kv_cache=500,
        host_kv=64,
    )  # fmt: skip
    async with serving(memory=memory) as client:
        text = await series(client)
    families = {f.name: f for f in text_string_to_metric_families(text)}
    by_kind = {s.labels["kind"]: s.value for s in families["aserve_memory_bytes"].samples}
    parts = {"weights": 400, "activations": 50, "graphs": 7, "kv_cache": 500, "others": 10, "unused": 33}
    assert by_kind == parts
    got = totals(text)
    assert got["aserve_memory_total_bytes"] == sum(parts.values())
    assert got["aserve_kv_cache_tokens"] == 256 * 4
    assert got["aserve_longest_request_tokens"] == 512
    assert got["aserve_full_length_requests"] == 2
    assert got["aserve_host_kv_cache_bytes"] == 64


async def test_an_engine_that_measured_nothing_has_no_memory_series(serving):
    async with serving() as client:
        text = await series(client)
        assert "aserve_memory_" not in text
        assert "aserve_longest_request_tokens" in text


async def test_clients_cannot_make_series(serving):
    rng = random.Random(2)

    async def odd():
        word = "".join(rng.choice(string.ascii_lowercase) for _ in range(10))
        agent = {"user-agent": word, "x-request-id": word}
        kind = rng.randrange(5)
        if kind == 0:
            await client.get(f"/{word}", agent)
        elif kind == 1:
            await client.chat(model=word)
        elif kind == 2:
            await client.request("BREW" if rng.random() < 0.5 else word.upper(), CHAT, headers=agent)
        elif kind == 3:
            await client.chat(user=word, temperature=word)
        else:
            await client.get(f"/v1/models/{word}")

    def count(text):
        return sum(1 for line in text.splitlines() if line and not line.startswith("#"))

    async with serving() as client:
        for _ in range(40):
            await odd()
        before = count(await series(client))
        for _ in range(300):
            await odd()
        text = await series(client)
        assert count(text) <= before + 5
        for line in text.splitlines():
            assert not line or line.startswith("#") or float(line.rsplit(" ", 1)[1]) >= 0


async def test_requests_are_counted_by_outcome(serving):
    async with serving() as client:
        await client.chat(max_tokens=1)
        await client.chat(temperature="hot")
        await client.get("/nope")
        text = await series(client)
        for labels in (
            'outcome="ok",route="/v1/chat/completions",status="200"',
            'outcome="invalid_value",route="/v1/chat/completions",status="400"',
            'outcome="not_found",route="other",status="404"',
        ):
            assert f"aserve_http_requests_total{{{labels}}} 1.0" in text
