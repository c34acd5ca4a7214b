"""The settings that size the KV cache: what is a mistake says which one."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.core.config import CacheConfig
from aserve.core.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_memory": "0"}, "--kv-cache-memory must be more than 0 bytes, not 0"),
        (
            {"kv_cache_memory": "0.8"},
            "--kv-cache-memory must be more than 0 bytes, not 0.8; a share of a GPU is set by "
            "--gpu-memory-fraction 0.8",
        ),
        ({"kv_cache_memory": "6"}, "--kv-cache-memory 6 is 6 bytes; did you mean 6GiB?"),
        ({"kv_cache_memory": "1.5B"}, "--kv-cache-memory 1.5B is 1 bytes; did you mean 1.5GiB?"),
        ({"host_cache_memory": "8"}, "--host-cache-memory 8 is 8 bytes; did you mean 8GiB?"),
        (
            {"host_cache_memory": "much"},
            "--host-cache-memory: 'much' is not a size; write for example 6GiB, 500MB or 1048576",
        ),
        (
            {"kv_cache_memory": "9" * 30},
            "--kv-cache-memory: a size of 99999999999999999999... is larger than any memory",
        ),
        (
            {"gpu_memory_fraction": 80.0},
            "--gpu-memory-fraction is a share of the whole card, above 0 and up to 1, not 80; for 80 % write 0.8",
        ),
        (
            {"gpu_memory_fraction": 0.0},
            "--gpu-memory-fraction is a share of the whole card, above 0 and up to 1, not 0",
        ),
        (
            {"gpu_memory_fraction": 200.0},
            "--gpu-memory-fraction is a share of the whole card, above 0 and up to 1, not 200",
        ),
        (
            {"kv_cache_tokens": 10, "gpu_memory_fraction": 0.5},
            "set only one size of the KV cache, not --kv-cache-tokens and --gpu-memory-fraction",
        ),
        ({"kv_cache_tokens": 0}, "--kv-cache-tokens must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_mistakes(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CacheConfig(**settings)
    assert caught.value.message == message


@pytest.mark.parametrize("size", ["6GiB", "500MB", "1048576", "0.5GiB", "1KiB", " 6 gib "])
def test_sizes(size: str) -> None:
    assert CacheConfig(kv_cache_memory=size).kv_cache_memory == size
