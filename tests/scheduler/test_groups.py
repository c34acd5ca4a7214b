"""Windows: what is held, what is given back, which prefixes match, and that whatever is let in gets to its end."""

from __future__ import annotations

import pytest
from driver import Driver, capacity, request

from aserve.core.capacity import Capacity
from aserve.core.request import FinishReason
from aserve.scheduler.prefix_key import extend_hashes
from aserve.scheduler.sequence import Sequence


def held(driver: Driver) -> int:
    return driver.scheduler.stats().num_used_blocks


def test_a_windowed_layer_holds_its_window_and_no_more() -> None:
    """300 tokens over 3 blocks of 4: a window of 6 touches 3 blocks at most."""
    driver = Driver(capacity(3, 4, windows=(6,), max_model_len=300))
    assert driver.capacity.max_length == 300
    driver.add(request("a", "abcdefgh" * 2, 284))
    most = 0
    while driver.plan():
        most = max(most, held(driver))
        driver.commit()
    assert most == 3
    driver.finish()


def test_groups_without_a_window_keep_everything() -> None:
    driver = Driver(capacity(100, 4, windows=(None, 6, 6), max_model_len=200))
    driver.add(request("a", "abcd", 60))
    for _ in range(41):
        driver.step()
    assert held(driver) == 11 + 2 * 2  # 44 tokens, of which the last 6 lie in 2 blocks
    driver.finish()


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_that_a_step_in_flight_reads_stay(depth: int) -> None:
    driver = Driver(capacity(40, 2, windows=(4,), max_in_flight=depth, max_batch_tokens=4))
    driver.add(request("a", "abcdefghijklmnop", 6))
    driver.finish()  # the driver looks at every block that an uncommitted row reads
    assert held(driver) == 0


def test_a_prefix_matches_without_the_blocks_behind_its_window() -> None:
    """Of 16 cached tokens the window group needs the last 4; its earlier blocks are taken by another request."""
    driver = Driver(capacity(16, 4, windows=(None, 4), max_batch_tokens=64))
    driver.add(request("a", "abcdefghijklmnopX", 1))
    driver.finish()
    pool = driver.scheduler.kv.pool
    windowed = [pool.lookup(h + b"\1") for h in _hashes(driver, "abcdefghijklmnop")]
    full = [pool.lookup(h + b"\0") for h in _hashes(driver, "abcdefghijklmnop")]
    assert None not in windowed + full
    for block_id in windowed[:3]:
        assert block_id is not None
        pool.unpublish(block_id)
    driver.add(request("b", "abcdefghijklmnopY", 1, arrival=1))
    driver.finish()
    assert driver.events["b"][0].num_cached_tokens == 16


@pytest.mark.parametrize(("lost", "cached"), [(3, 12), (2, 8), (1, 16), (0, 16)])
def test_the_longest_prefix_that_every_group_can_start_from(lost: int, cached: int) -> None:
    """A window of 6 before token 16 touches blocks 2 and 3, before 12 blocks 1 and 2, before 8 blocks 0 and 1."""
    driver = Driver(capacity(30, 4, windows=(None, 6), max_batch_tokens=64))
    driver.add(request("a", "abcdefghijklmnopX", 1))
    driver.finish()
    pool = driver.scheduler.kv.pool
    block_id = pool.lookup(_hashes(driver, "abcdefghijklmnop")[lost] + b"\1")
    assert block_id is not None
    pool.unpublish(block_id)
    driver.add(request("b", "abcdefghijklmnopY", 1, arrival=1))
    driver.finish()
    assert driver.events["b"][0].num_cached_tokens == cached


def test_a_lost_block_of_a_full_group_ends_every_match_there() -> None:
    driver = Driver(capacity(30, 4, windows=(None, 6), max_batch_tokens=64))
    driver.add(request("a", "abcdefghijklmnopX", 1))
    driver.finish()
    pool = driver.scheduler.kv.pool
    block_id = pool.lookup(_hashes(driver, "abcdefghijklmnop")[1] + b"\0")
    assert block_id is not None
    pool.unpublish(block_id)
    driver.add(request("b", "abcdefghijklmnopY", 1, arrival=1))
    driver.finish()
    assert driver.events["b"][0].num_cached_tokens == 4


def _hashes(driver: Driver, text: str) -> list[bytes]:
    sequence = Sequence(request("hashes", text, 1), (0, 0))
    extend_hashes(sequence, len(text) // driver.capacity.block_size, driver.capacity.block_size)
    return sequence.block_hashes


def smallest(block_size: int, depth: int, windows: tuple[int | None, ...], num_extra: int) -> Capacity:
    """A cache for about three blocks of text, and ``num_extra`` blocks that make no whole place."""
    needed = capacity(1000, block_size, windows=windows).num_blocks_for(3 * block_size)
    return capacity(
        needed + num_extra,
        block_size,
        max_in_flight=depth,
        windows=windows,
        max_batch_tokens=7,
        max_model_len=4 * block_size + 9,
    )


@pytest.mark.parametrize("num_extra", [0, 1])
@pytest.mark.parametrize("windows", [(None,), (None, 5), (3,), (None, 7, 70)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 64])
def test_one_request_grows_to_the_exact_end_of_the_cache(
    block_size: int, depth: int, windows: tuple[int | None, ...], num_extra: int
) -> None:
    size = smallest(block_size, depth, windows, num_extra)
    for prompt in {1, size.max_length // 2, size.max_length - 1}:
        driver = Driver(size)
        driver.add(request("a", (7,) * prompt, size.max_length - prompt))
        driver.finish()
        assert len(driver.events["a"]) == size.max_length - prompt
        assert driver.events["a"][-1].finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
@pytest.mark.parametrize("depth", [1, 2])
def test_requests_at_the_limit_run_one_after_the_other_and_a_small_one_behind_them(
    depth: int, windows: tuple[int | None, ...]
) -> None:
    """A burst beyond the cache before any prefix is known: nobody waits for ever, nobody is lost."""
    size = smallest(4, depth, windows, 0)
    driver = Driver(size)
    for n in range(6):
        driver.add(request(f"r{n}", (n,) * (size.max_length - 1 - n), 1 + n, arrival=n))
    driver.add(request("small", "ab", 2, arrival=9))
    driver.finish()
    assert driver.events["small"][-1].finish_reason == FinishReason.LENGTH
    with pytest.raises(AssertionError, match="never fit"):
        driver.scheduler.add(request("too long", (1,) * size.max_length, 1, arrival=10))
