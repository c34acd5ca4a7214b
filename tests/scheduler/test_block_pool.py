"""The pool alone: order of reuse, holders, and what the index remembers."""

from __future__ import annotations

import pytest

from aserve.scheduler.block_pool import BlockPool, OutOfBlocksError


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
    with pytest.raises(OutOfBlocksError):
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


def test_clearing_the_index_forgets_every_prefix() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, b"1")
    pool.clear_index()
    assert pool.lookup(b"1") is None
    assert pool.num_indexed == 0
    pool.publish(block, b"2")
    assert pool.lookup(b"2") == block


def test_a_release_too_many_is_caught() -> None:
    pool = BlockPool(1)
    pool.release(pool.allocate())
    with pytest.raises(AssertionError):
        pool.release(0)
