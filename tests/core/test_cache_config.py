"""Settings of the KV cache that exclude each other are refused with the flags' names."""

from __future__ import annotations

import pytest

from aserve.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
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


def test_no_prefix_goes_first_where_none_is_cached() -> None:
    model, lookahead = ModelConfig(model="m"), SchedulerConfig(prefix_lookahead=1)
    EngineConfig(model=model, scheduler=lookahead)
    with pytest.raises(ConfigError, match=r"--prefix-lookahead .* --no-prefix-cache"):
        EngineConfig(model=model, scheduler=lookahead, cache=CacheConfig(prefix_cache=False))
