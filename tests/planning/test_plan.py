"""The plan for a GPU that is not there: the table, types of KV, several GPUs, and what cannot be served yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aserve.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from aserve.core.errors import ConfigError
from aserve.planning import plan as planning
from aserve.planning.kv_elements import QUANTIZED, plain_elements
from aserve.planning.kv_size import TooLittleMemoryError
from aserve.planning.plan import Device, Plan, capacity_of, describe, fitting_capacity, make_plan, read_device
from aserve.planning.table import full_length_requests, memory_line, memory_rows, memory_table
from aserve.quantization.registry import SCHEMES

GIB = 2**30


@pytest.fixture
def planned(configs: dict[str, Any]) -> Callable[..., Plan]:
    def make(model: str, *, gib: float = 24, ranks: int = 1, kv_dtype: str = "auto", **settings: Any) -> Plan:
        def part(owner: Any) -> dict[str, Any]:
            return {k: v for k, v in settings.items() if k in owner.__dataclass_fields__}

        config = EngineConfig(
            model=ModelConfig(model=model, **part(ModelConfig)),
            cache=CacheConfig(**part(CacheConfig)),
            scheduler=SchedulerConfig(**part(SchedulerConfig)),
        )
        return make_plan(config, configs[model], Device(total=int(gib * GIB), ranks=ranks), kv_dtype)

    return make


def test_a_32b_model_on_24_gib(planned: Callable[..., Plan]) -> None:
    """How long a request may be: what users of 24 GiB cards ask."""
    plan = planned("qwen2-32b-awq", max_batch_tokens=2048, max_num_seqs=16)
    lengths = {
        kv.name: capacity.max_length
        for kv, sizing in plan.sizings.items()
        if (capacity := fitting_capacity(sizing)) is not None
    }
    assert list(lengths) == ["float16", "fp8", "int8", "int4"]
    assert plan.sizings[plain_elements("float16")].token_bytes == 2 * 64 * 8 * 128 * 2
    free = 0.9 * 24 * GIB - capacity_of(plan).memory.taken
    assert lengths["float16"] == pytest.approx(free / 262144, rel=0.01)
    assert lengths["fp8"] == pytest.approx(2 * lengths["float16"], rel=0.01)
    assert lengths["int4"] == pytest.approx(free / (64 * 8 * 2 * (64 + 4)), rel=0.01)
    assert 8000 < lengths["float16"] < 11000
    assert 30000 < lengths["int4"] < 40000


def test_what_cannot_be_served_is_marked(planned: Callable[..., Plan]) -> None:
    assert not list(planned("qwen2-7b").not_served())
    plan = planned("qwen2-32b-awq", ranks=2, kv_dtype="int4")
    marks = [line for line in describe(plan) if planning.NOT_SERVED in line]
    assert [mark.split(":")[0] for mark in marks] == ["awq weights", "--tp 2", "--kv-dtype int4"]
    assert [plan.is_served(kv) for kv in plan.sizings] == [False, True, False, False]
    assert next(iter(plan.sizings)).name == "int4"
    assert list(planned("qwen2-7b", dtype="float32", kv_dtype="bf16").not_served()) == ["--kv-dtype bfloat16"]


def test_the_methods_that_are_served_are_those_of_the_registry() -> None:
    assert {name for name in SCHEMES if name is not None} == planning.SERVED_METHODS


def test_two_gpus_take_half_each(planned: Callable[..., Plan]) -> None:
    one, two = (capacity_of(planned("llama3-8b", gib=80, ranks=n)) for n in (1, 2))
    assert two.memory.weights == pytest.approx(one.memory.weights / 2, rel=0.01)
    assert two.memory.activations < one.memory.activations
    assert two.num_kv_tokens > 2 * one.num_kv_tokens


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"max_batch_tokens": 16384}, "activations and sampling of the largest step"),
        ({"max_num_seqs": 1024}, "activations and sampling of the largest step"),
        ({"dtype": "float32"}, "weights"),
        ({"gpu_memory_fraction": 0.95}, "KV cache"),
    ],
)
def test_what_each_setting_costs(planned: Callable[..., Plan], changes: dict[str, Any], row: str) -> None:
    before, after = (dict(memory_rows(capacity_of(planned("llama3-8b", gib=80, **c)).memory)) for c in ({}, changes))
    assert after[row] > before[row]
    assert sum(after.values()) == sum(before.values()) == 80 * GIB


def test_graphs_take_memory_unless_they_are_switched_off(planned: Callable[..., Plan]) -> None:
    with_graphs, without = (capacity_of(planned("qwen2-7b", cuda_graphs=on)) for on in (True, False))
    assert with_graphs.memory.graphs > 0 == without.memory.graphs
    assert with_graphs.num_blocks < without.num_blocks


@pytest.mark.parametrize("model", ["qwen2-7b", "qwen2-32b-awq", "gemma2-2b", "gemma3-4b", "mistral-7b"])
@pytest.mark.parametrize("gib", [24, 1000])
def test_the_table_fits_80_columns(planned: Callable[..., Plan], model: str, gib: int) -> None:
    plan = planned(model, gib=gib)
    capacity = capacity_of(plan)
    table = memory_table(capacity.memory, capacity)
    lines = [*table.splitlines(), *describe(plan)]
    assert max(map(len, lines)) <= 80
    assert f"longest request: {capacity.max_length:,} tokens" in table
    assert f"in parallel: {full_length_requests(capacity):,}" in table
    on_host = replace(capacity.memory, on_gpu=False, graphs=0, host_kv=3 * GIB)
    table = memory_table(on_host, replace(capacity, num_host_blocks=5))
    assert "memory of the host" in table
    assert "graphs" not in table
    assert "  KV that left the cache" in table
    assert "host memory for KV" not in table
    on_gpu = memory_table(replace(capacity.memory, host_kv=3 * GIB), capacity)
    assert "host memory for KV that left the cache" in on_gpu
    assert f"{plan.sizing.token_bytes * capacity.num_groups:,} bytes a token" in table
    line = memory_line(capacity.memory, capacity)
    assert "\n" not in line
    assert all(f"{name} " in line for name, _ in memory_rows(capacity.memory))
    assert f"longest request {capacity.max_length} tokens, {full_length_requests(capacity)} of that length" in line


def test_windows_make_room_for_more_requests(planned: Callable[..., Plan]) -> None:
    plan = planned("gemma2-2b", gib=24)
    capacity = capacity_of(plan)
    whole = capacity.num_blocks // (2 * capacity.num_blocks_for(capacity.max_length) - 2)
    assert full_length_requests(capacity) > whole


def test_what_does_not_fit_says_what_would(planned: Callable[..., Plan]) -> None:
    with pytest.raises(TooLittleMemoryError, match=r"set --dtype bfloat16$"):
        capacity_of(planned("qwen2-7b", dtype="float32"))
    with pytest.raises(TooLittleMemoryError, match=r"these settings take one of (\d+) GiB\)$") as caught:
        capacity_of(planned("qwen2-7b", gib=15))
    least = int(caught.value.message.split()[-2])
    assert capacity_of(planned("qwen2-7b", gib=least)).max_length >= 256
    with pytest.raises(TooLittleMemoryError):
        capacity_of(planned("qwen2-7b", gib=least - 1))


def test_kv_types_have_room_for_their_scales() -> None:
    assert [(kv.name, kv.bits, kv.vector_bytes) for kv in QUANTIZED] == [("fp8", 8, 0), ("int8", 8, 4), ("int4", 4, 4)]


@pytest.mark.parametrize(
    ("gpu_memory", "ranks", "message"),
    [
        (None, 1, "for example --gpu-memory 24GiB"),
        ("24", 1, "--gpu-memory 24 is less than any GPU has; did you mean 24GiB?"),
        ("much", 1, "--gpu-memory: 'much' is not a size"),
        ("24GiB", 0, "--tp must be at least 1, got 0"),
    ],
)
def test_devices_that_make_no_sense(gpu_memory: str | None, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_device(gpu_memory, ranks)
    assert message in caught.value.message
