"""Blocks to host memory and back: what they hold survives, in the order of plans, in few operations."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aserve.core.config import CacheConfig
from aserve.core.errors import ConfigError
from aserve.core.memory import MemoryUse
from aserve.core.step import BlockCopy, StepPlan
from aserve.runtime import executor
from aserve.runtime.host_tier import HostTier, count_host_blocks
from aserve.runtime.kv_cache import KvCaches

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS, BLOCKS = 3, 40


def make_caches(device: str, dtype: torch.dtype = torch.float32) -> KvCaches:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        (
            torch.randn(BLOCKS, 4, 2, 3, generator=generator).to(device, dtype),
            torch.randn(BLOCKS, 4, 2, 3, generator=generator).to(device, dtype),
        )
        for _ in range(LAYERS)
    )


def copies(pairs: Sequence[tuple[int, int]]) -> tuple[BlockCopy, ...]:
    return tuple(BlockCopy(*pair) for pair in pairs)


def contents(caches: KvCaches, block_id: int) -> torch.Tensor:
    return torch.stack([cache[block_id] for pair in caches for cache in pair]).cpu()


def spoil(caches: KvCaches, block_ids: Sequence[int]) -> None:
    for pair in caches:
        for cache in pair:
            cache[list(block_ids)] = float("nan")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("staged", [1, 3, 100])
def test_what_was_saved_comes_back_wherever_it_goes(device: str, dtype: torch.dtype, staged: int) -> None:
    caches = make_caches(device, dtype)
    block_bytes = LAYERS * 2 * 4 * 2 * 3 * dtype.itemsize
    tier = HostTier(caches, 20, staging_bytes=staged * block_bytes)
    before = {n: contents(caches, n) for n in range(BLOCKS)}
    saved = [(5, 19), (39, 0), (7, 2), (0, 1), (12, 3), (30, 11), (31, 10)]
    tier.copy(StepPlan(0, (), copies(saved)))
    spoil(caches, [block for block, _ in saved])
    targets = [3, 39, 5, 20, 0, 12, 31]
    restored = [(target, slot) for target, (_, slot) in zip(targets, saved, strict=True)]
    tier.copy(StepPlan(1, (), (), copies(restored)))
    for target, (block, _) in zip(targets, saved, strict=True):
        assert torch.equal(contents(caches, target), before[block])
    for untouched in set(range(BLOCKS)) - set(targets) - {block for block, _ in saved}:
        assert torch.equal(contents(caches, untouched), before[untouched])
    tier.close()
    tier.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_saves_before_it_restores(device: str) -> None:
    caches = make_caches(device)
    tier = HostTier(caches, 4)
    first, second = contents(caches, 1), contents(caches, 2)
    tier.copy(StepPlan(0, (), copies([(1, 0)])))
    tier.copy(StepPlan(1, (), copies([(2, 1)]), copies([(2, 0), (9, 1)])))  # block 2 leaves, and gets another's
    assert torch.equal(contents(caches, 2), first)
    assert torch.equal(contents(caches, 9), second)
    tier.copy(StepPlan(2, (), copies([(9, 0)]), copies([(3, 0)])))  # a slot that is used again
    assert torch.equal(contents(caches, 3), second)
    tier.close()


def test_the_number_of_operations_does_not_grow_with_the_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    tier = HostTier(make_caches("cpu"), 30)
    count(torch, "index_select")
    count(torch.Tensor, "index_copy_")
    count(torch.Tensor, "copy_")
    for size in (1, 30):
        calls.clear()
        pairs = copies([(n, n) for n in range(size)])
        tier.copy(StepPlan(0, (), pairs, pairs))
        assert sorted(calls) == ["copy_"] * 2 + ["index_copy_"] * 2 * LAYERS + ["index_select"] * 2 * LAYERS


def test_the_flag_says_how_many_blocks() -> None:
    assert count_host_blocks(None, block_bytes=1000, available=0) == 0
    assert count_host_blocks("1MiB", block_bytes=1000, available=2**20) == 1048
    with pytest.raises(ConfigError, match=r"--host-cache-memory 1KiB holds no KV block; set at least .* 2KiB"):
        count_host_blocks("1KiB", block_bytes=2000, available=2**30)
    with pytest.raises(ConfigError, match=r"--host-cache-memory 2GiB is more than the 1024 MiB of host memory"):
        count_host_blocks("2GiB", block_bytes=2000, available=2**30)


def test_an_executor_says_how_many_blocks_it_has_and_what_they_take(make_executor: Any) -> None:
    capacity = make_executor(kv_cache_tokens=64, host_cache_memory="100KiB").capacity
    assert capacity.num_host_blocks == 100 * 1024 // 8192  # 16 tokens of 2 layers, 2 heads of 16, float32
    assert capacity.memory.host_kv == capacity.num_host_blocks * 8192
    assert make_executor(kv_cache_tokens=64).capacity.num_host_blocks == 0
    with pytest.raises(ConfigError, match="--host-cache-memory 8000 holds no KV block"):
        make_executor(host_cache_memory="8000")
    with pytest.raises(ConfigError, match="--host-cache-memory 9999GiB is more than"):
        make_executor(host_cache_memory="9999GiB")


@pytest.mark.parametrize("name", ["empty", "zeros"])
def test_memory_that_cannot_be_had_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    caches = make_caches("cpu")
    monkeypatch.setattr(torch, name, fail)
    with pytest.raises(ConfigError, match="--host-cache-memory"):
        HostTier(caches, 4)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_on_the_cpu_room_is_left_for_a_step(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryUse(device="x", on_gpu=on_gpu, total=2**30, others=0, weights=0, activations=2**20)
    sizing: Any = SimpleNamespace(block_bytes=1024, limits=None, memory_of=lambda _: memory)
    monkeypatch.setattr(executor, "available_bytes", lambda: 2**20 + 4096)
    monkeypatch.setattr(executor, "HostTier", lambda caches, num_blocks: num_blocks)
    assert executor._allocate_host_tier(CacheConfig(host_cache_memory="4KiB"), (), sizing) == 4
    larger = CacheConfig(host_cache_memory="5KiB")
    if on_gpu:
        assert executor._allocate_host_tier(larger, (), sizing) == 5
    else:
        with pytest.raises(ConfigError, match="--host-cache-memory 5KiB is more than the 0 MiB"):
            executor._allocate_host_tier(larger, (), sizing)
