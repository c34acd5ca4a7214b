"""How many KV blocks are made of what memory, and what is said when there is too little."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aserve.core.config import CacheConfig
from aserve.core.errors import ConfigError
from aserve.core.model_spec import ModelSpec
from aserve.runtime.kv_cache import (
    CacheNeeds,
    GpuMemory,
    allocate,
    block_bytes,
    count_cpu_blocks,
    count_gpu_blocks,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30
SPEC = ModelSpec.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
)
# one block of 16 tokens is 1 MiB, a sequence of full length 1,000 blocks
NEEDS = CacheNeeds(block_bytes=MIB, sequence_blocks=1000, max_num_seqs=32)
H200 = GpuMemory(total=100 * GIB, others=GIB, weights=16 * GIB, activations=3 * GIB)


def test_block_bytes() -> None:
    assert block_bytes(SPEC, torch.bfloat16, 16) == 2 * 3 * 16 * 2 * 16 * 2
    assert block_bytes(SPEC, torch.float32, 8) == 2 * 3 * 8 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("available", "needs", "expected"),
    [
        pytest.param(64 * GIB, NEEDS, 1024, id="1 GiB at most"),
        pytest.param(64 * GIB, replace(NEEDS, sequence_blocks=10), 320, id="all sequences at full length"),
        pytest.param(4 * GIB, NEEDS, 1024, id="a quarter of what is available"),
        pytest.param(2 * GIB, NEEDS, 1000, id="one whole sequence, more than a quarter"),
        pytest.param(64 * GIB, replace(NEEDS, sequence_blocks=5000), 5000, id="one whole sequence, more than 1 GiB"),
        pytest.param(GIB, NEEDS, 512, id="half of what is available, less than one sequence"),
        pytest.param(2 * MIB, NEEDS, 1, id="one block"),
    ],
)
def test_default_on_cpu(available: int, needs: CacheNeeds, expected: int) -> None:
    assert count_cpu_blocks(CacheConfig(), needs, available) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CacheConfig(kv_cache_tokens=1), 1),
        (CacheConfig(kv_cache_tokens=1600), 100),
        (CacheConfig(kv_cache_tokens=1601), 101),
        (CacheConfig(kv_cache_memory="3GiB"), 3072),
        (CacheConfig(kv_cache_memory="1.5MiB"), 1),
    ],
)
def test_asked_size_is_taken(config: CacheConfig, expected: int) -> None:
    assert count_cpu_blocks(config, NEEDS, 4 * GIB) == expected
    assert count_gpu_blocks(config, NEEDS, H200) == expected


@pytest.mark.parametrize(
    ("fraction", "memory", "expected"),
    [
        (None, H200, (90 - 20) * 1024),
        (0.5, H200, (50 - 20) * 1024),
        (1.0, H200, (100 - 20) * 1024),
        (None, replace(H200, others=60 * GIB), (90 - 79) * 1024),
    ],
)
def test_share_of_the_gpu(fraction: float | None, memory: GpuMemory, expected: int) -> None:
    assert count_gpu_blocks(CacheConfig(gpu_memory_fraction=fraction), NEEDS, memory) == expected


@pytest.mark.parametrize(
    ("config", "available", "message"),
    [
        (
            CacheConfig(kv_cache_memory="8GiB"),
            4 * GIB,
            "--kv-cache-memory 8GiB needs 8.00 GiB, but 4.00 GiB are available after loading the model; "
            "set at most --kv-cache-memory 4096MiB",
        ),
        (
            CacheConfig(kv_cache_tokens=160_000),
            4 * GIB,
            "--kv-cache-tokens 160000 needs 9.77 GiB, but 4.00 GiB are available after loading the model; "
            "set at most --kv-cache-tokens 65536",
        ),
        (
            CacheConfig(kv_cache_tokens=16),
            100,
            "--kv-cache-tokens 16 needs 1.0 MiB, but 0.0 MiB are available after loading the model; "
            "free memory or use a smaller model",
        ),
        (
            CacheConfig(kv_cache_memory="500KiB"),
            4 * GIB,
            "--kv-cache-memory 500KiB holds no KV block: 16 tokens of this model take 1.0 MiB; "
            "set at least --kv-cache-memory 1024KiB",
        ),
        (
            CacheConfig(gpu_memory_fraction=0.5),
            4 * GIB,
            "--gpu-memory-fraction needs a GPU; on the CPU use --kv-cache-memory or --kv-cache-tokens",
        ),
        (
            CacheConfig(),
            100 * KIB,
            "too little memory for a KV cache: 0.1 MiB are available after loading the model, and one block takes "
            "1.0 MiB; free memory or use a smaller model",
        ),
    ],
)
def test_too_little_on_cpu(config: CacheConfig, available: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        count_cpu_blocks(config, NEEDS, available)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("config", "memory", "message"),
    [
        (
            CacheConfig(gpu_memory_fraction=0.15),
            H200,
            "no memory is left for the KV cache: 0.15 of 100.00 GiB is 15.00 GiB, weights take 16.00 GiB, a step's "
            "activations 3.00 GiB, other use of the device 1.00 GiB; set --gpu-memory-fraction 0.21",
        ),
        (
            CacheConfig(),
            replace(H200, weights=98 * GIB),
            "no memory is left for the KV cache: 0.9 of 100.00 GiB is 90.00 GiB, weights take 98.00 GiB, a step's "
            "activations 3.00 GiB, other use of the device 1.00 GiB; lower --max-batch-tokens or --max-num-seqs, "
            "free memory on the device, or use a smaller model",
        ),
        (
            CacheConfig(kv_cache_memory="81GiB"),
            H200,
            "--kv-cache-memory 81GiB needs 81.00 GiB, but 80.00 GiB are available after loading the model; "
            "set at most --kv-cache-memory 81920MiB",
        ),
    ],
)
def test_too_little_on_gpu(config: CacheConfig, memory: GpuMemory, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        count_gpu_blocks(config, NEEDS, memory)
    assert caught.value.message == message


@pytest.mark.parametrize("available", [3 * MIB + 7, 200 * MIB + 999, 5 * GIB])
@pytest.mark.parametrize("size", [MIB, 360 * KIB, 12_345])
def test_the_suggested_size_works(available: int, size: int) -> None:
    needs = replace(NEEDS, block_bytes=size)
    for config in (CacheConfig(kv_cache_memory="90GiB"), CacheConfig(kv_cache_tokens=10**9)):
        with pytest.raises(ConfigError) as caught:
            count_cpu_blocks(config, needs, available)
        flag, value = caught.value.message.split()[-2:]
        by_tokens = flag == "--kv-cache-tokens"
        better = CacheConfig(kv_cache_tokens=int(value)) if by_tokens else CacheConfig(kv_cache_memory=value)
        assert count_cpu_blocks(better, needs, available) >= 1


def test_allocate() -> None:
    caches = allocate(SPEC, num_blocks=5, block_size=8, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert len(caches) == 3
    assert {(t.shape, t.dtype) for pair in caches for t in pair} == {((5, 8, 2, 16), torch.bfloat16)}


def test_allocation_failure_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"KV cache of 800000000000000 tokens .* set a smaller --kv-cache-memory"):
        allocate(SPEC, num_blocks=10**14, block_size=8, dtype=torch.bfloat16, device=torch.device("cpu"))
