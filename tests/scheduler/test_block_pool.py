"""The pool alone: order of reuse, holders, and what the index remembers."""

from __future__ import annotations

import pytest

from aserve.scheduler.block_pool import BlockPool


def test_blocks_without_a_prefix_are_reused_before_those_with_one() -> None:
    pool = BlockPool(3)
    first, second, third = (pool.allocate() for _ in range(3))
    pool.publish(first, b"1")
    for block in (first, second, third):
        pool.release(block)
    assert [pool.allocate() for _ in range(3)] == [third, second, first]
    assert pool.lookup(b"1") is None, "a reused block is still found"


def test_a_hold_keeps_a_cached_block() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, b"1")
    pool.release(block)
    pool.hold(block)
    pool.hold(block)
    pool.release(block)
    assert pool.num_free == 1
    assert pool.allocate() != block
    with pytest.raises(AssertionError, match="no KV block is free"):
        pool.allocate()


def test_a_prefix_keeps_its_first_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"1")
    pool.publish(second, b"1")
    assert pool.lookup(b"1") == first
    pool.release(second)
    assert pool.allocate() == second
    assert pool.lookup(b"1") == first


def test_a_block_that_is_not_trusted_is_no_longer_found() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, b"1")
    pool.unpublish(block)
    pool.unpublish(block)
    assert pool.lookup(b"1") is None
    pool.publish(block, b"2")
    assert pool.lookup(b"2") == block


def test_a_release_too_many_is_caught() -> None:
    pool = BlockPool(1)
    pool.release(pool.allocate())
    with pytest.raises(AssertionError):
        pool.release(0)
