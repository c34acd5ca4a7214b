"""Settings of the KV cache that exclude each other are refused with the flags' names."""

from __future__ import annotations

import pytest

from aserve.core.config import CacheConfig
from aserve.core.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_cache_memory": "0"}, "--host-cache-memory must be more than 0"),
        ({"host_cache_memory": "much"}, "much"),
        ({"host_cache_memory": "1GiB", "prefix_cache": False}, "--host-cache-memory keeps prefixes"),
    ],
)
def test_host_memory_for_prefixes(settings: dict[str, object], message: str) -> None:
    assert CacheConfig(host_cache_memory="1GiB").host_cache_memory == "1GiB"
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**settings)
