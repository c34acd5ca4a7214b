"""How many KV blocks are made of what memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aserve.core.errors import ConfigError
from aserve.core.model_spec import ModelSpec
from aserve.planning.kv_elements import plain_elements
from aserve.planning.kv_size import Sizing, TooLittleMemoryError, count_blocks
from aserve.planning.table import memory_rows, memory_table

MIB, GIB = 2**20, 2**30
Make = Callable[..., Sizing]
HOST: dict[str, Any] = {
    "on_gpu": False,
    "others": 0,
    "weights": 0,
    "limits": {"max_batch_tokens": 16, "max_num_seqs": 31},
}
STEP = 32 * MIB  # of the host's limits: 16 tokens and 31 sequences
GPU_STEP = 768 * MIB


@pytest.mark.parametrize(
    ("available", "max_model_len", "expected"),
    [
        pytest.param(64 * GIB, 16000, 1024, id="1 GiB at most"),
        pytest.param(64 * GIB, 160, 310, id="all sequences at full length"),
        pytest.param(4 * GIB, 16000, 1024, id="a quarter of what is available"),
        pytest.param(2 * GIB, 16000, 1000, id="one whole sequence, more than a quarter"),
        pytest.param(64 * GIB, 32768, 2048, id="one whole sequence, more than 1 GiB"),
        pytest.param(GIB, 16000, 512, id="half of what is available, less than one sequence"),
        pytest.param(32 * MIB, 16000, 16, id="the least that is of use"),
    ],
)
def test_default_on_cpu(make_sizing: Make, available: int, max_model_len: int, expected: int) -> None:
    limits = {**HOST["limits"], "max_model_len": max_model_len}
    assert count_blocks(make_sizing(**{**HOST, "limits": limits}, total=available + STEP)) == expected


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({"kv_cache_tokens": 1}, 1),
        ({"kv_cache_tokens": 1600}, 100),
        ({"kv_cache_tokens": 1601}, 101),
        ({"kv_cache_memory": "3GiB"}, 3072),
        ({"kv_cache_memory": "1.5MiB"}, 1),
    ],
)
def test_asked_size_is_taken(make_sizing: Make, cache: dict[str, Any], expected: int) -> None:
    assert count_blocks(make_sizing(**cache)) == expected
    assert count_blocks(make_sizing(**HOST, total=4 * GIB, **cache)) == expected


@pytest.mark.parametrize(
    ("fraction", "others", "expected"),
    [
        (None, GIB, (90 - 17) * 1024),
        (0.5, GIB, (50 - 17) * 1024),
        (1.0, GIB, (100 - 17) * 1024),
        (None, 60 * GIB, 14 * 1024),
    ],
)
def test_share_of_the_gpu(make_sizing: Make, fraction: float | None, others: int, expected: int) -> None:
    sizing = make_sizing(others=others, gpu_memory_fraction=fraction)
    assert count_blocks(sizing) == expected - GPU_STEP // MIB


def test_windows_make_groups_that_share_the_blocks(make_sizing: Make) -> None:
    sizing = make_sizing(model="gemma2-2b", kv_cache_tokens=1601, limits={"max_model_len": 8192})
    assert count_blocks(sizing) == 2 * 101  # 13 layers with a window of 4096 and 13 without
    assert sizing.capacity(202).num_kv_tokens == 1616
    assert sizing.blocks_for(8192) == 512 + 257


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kv_cache_memory": "85GiB"},
            "--kv-cache-memory 85GiB needs 85.00 GiB, but 82.25 GiB of 100.00 GiB are available: weights take "
            "16.00 GiB, a step's activations 768.0 MiB, other programs and the driver 1.00 GiB",
        ),
        (
            {"kv_cache_tokens": 1_600_000, "total": 20 * GIB},
            "--kv-cache-tokens 1600000 needs 97.66 GiB, but 2.25 GiB of 20.00 GiB are available: weights take "
            "16.00 GiB, a step's activations 768.0 MiB, other programs and the driver 1.00 GiB",
        ),
        (
            {"kv_cache_memory": "500KiB"},
            "--kv-cache-memory 500KiB holds no KV block: 16 tokens of this model take 1.0 MiB",
        ),
        (
            {"kv_cache_memory": "1.5MiB", "model": "gemma2-2b", "limits": {"max_model_len": 8192}},
            "--kv-cache-memory 1.5MiB holds no KV block: 16 tokens of this model take 2.0 MiB",
        ),
        (
            {"gpu_memory_fraction": 0.1775},
            "no memory is left for a KV cache of 16.0 MiB, which 256 tokens take: 0.1775 of 100.00 GiB is 17.75 GiB, "
            "weights take 16.00 GiB, a step's activations 768.0 MiB, other programs and the "
            "driver 1.00 GiB",
        ),
        (
            {**HOST, "total": STEP + 30 * MIB},
            "no memory is left for a KV cache of 16.0 MiB, which 256 tokens take: 30.0 MiB of 62.0 MiB "
            "are available, weights take 0.0 MiB, a step's activations 32.0 MiB, other programs 0.0 MiB",
        ),
    ],
)
def test_too_little(make_sizing: Make, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TooLittleMemoryError) as caught:
        count_blocks(make_sizing(**settings))
    assert caught.value.message == message


def test_graphs_are_a_part_of_what_is_taken(make_sizing: Make) -> None:
    sizing = make_sizing()
    memory = replace(sizing.memory_of(sizing.limits), graphs=3 * GIB)
    assert count_blocks(replace(sizing, memory_of=lambda _: memory)) == count_blocks(sizing) - 3 * 1024


def test_a_fraction_needs_a_gpu(make_sizing: Make) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-fraction needs a GPU; on the CPU use --kv-cache-memory"):
        count_blocks(make_sizing(**HOST, total=4 * GIB, gpu_memory_fraction=0.5))


@pytest.mark.parametrize(
    ("model", "ranks", "expected"),
    [
        ("llama3-8b", 1, 2 * 32 * 8 * 128 * 2),
        ("llama3-8b", 4, 2 * 32 * 2 * 128 * 2),
        ("llama3-8b", 16, 2 * 32 * 1 * 128 * 2),  # each KV head is held by two ranks
        ("gemma2-2b", 1, 2 * 13 * 4 * 256 * 2),  # of the layers of one group
    ],
)
def test_bytes_of_a_token(specs: dict[str, ModelSpec], model: str, ranks: int, expected: int) -> None:
    assert plain_elements("bfloat16").token_bytes(specs[model], ranks) == expected


def test_memory_with_a_cache(make_sizing: Make) -> None:
    sizing = make_sizing()
    memory = sizing.memory_with(replace(sizing.capacity(100), num_host_blocks=7))
    assert (memory.kv_cache, memory.host_kv) == (100 * MIB, 7 * MIB)
    assert memory.unused == 100 * GIB - memory.taken - 100 * MIB


def test_on_the_host_kv_that_left_the_cache_takes_of_the_same_memory(make_sizing: Make) -> None:
    sizing = make_sizing(**HOST, total=4 * GIB)
    capacity = replace(sizing.capacity(100), num_host_blocks=7)
    memory = sizing.memory_with(capacity)
    assert memory.unused == memory.available - memory.kv_cache - memory.host_kv
    assert memory.host_kv > 0
    assert sum(size for _, size in memory_rows(memory)) == memory.total
    assert memory_table(memory, capacity).count("KV that left the cache") == 1
