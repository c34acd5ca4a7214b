"""The scheduler's conscience: each statement is violated once, by hand, and must say so by its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from driver import Driver, capacity, request

from aserve.core.step import NO_BLOCK, BlockCopy, StepPlan
from aserve.scheduler import Scheduler, check, check_idle
from aserve.scheduler.invariants import check_plan


def busy() -> Scheduler:
    """Two sequences run and one waits; one step is in flight; there are cached blocks, here and on the host."""
    driver = Driver(capacity(14, 2, windows=(None, 3), max_num_seqs=2, max_in_flight=2, num_host_blocks=4))
    driver.add(request("before", "abcdefgh", 1))
    driver.finish()
    for n, prompt in enumerate(["0123", "zyx", "mnop"]):
        driver.add(request(prompt, prompt, 6, arrival=n + 1))
    for _ in range(4):
        driver.step()
    driver.plan()
    check(driver.scheduler)
    return driver.scheduler


def first_held(scheduler: Scheduler) -> int:
    return next(block for block in scheduler._running[0].block_tables[0] if block != NO_BLOCK)


def share(scheduler: Scheduler) -> None:
    """A block in a second table, before it is published."""
    first, second = scheduler._running
    pool = scheduler.kv.pool
    pool.unpublish(first.block_tables[0][0])
    pool.release(second.block_tables[0][0])
    second.block_tables[0][0] = first.block_tables[0][0]
    pool._ref_counts[first.block_tables[0][0]] += 1


def rename(scheduler: Scheduler) -> None:
    block = first_held(scheduler)
    pool = scheduler.kv.pool
    pool.unpublish(block)
    pool.publish(block, b"another prefix")


def let_go(scheduler: Scheduler) -> None:
    table = scheduler._running[0].block_tables[0]
    scheduler.kv.pool.release(table[0])
    table[0] = NO_BLOCK


def spoil_key(scheduler: Scheduler) -> None:
    pool = scheduler.kv.pool
    pool._keys[first_held(scheduler)] = b"unknown to the index"


VIOLATIONS: dict[str, tuple[str, Callable[[Scheduler], object]]] = {
    "a holder too many": ("S1: .* counted", lambda s: s.kv.pool.hold(first_held(s))),
    "held and free": ("S1: .* free or not", lambda s: s.kv.pool._free.update({first_held(s): None})),
    "a key of its own": ("S1: .* another block's key", spoil_key),
    "an entry without a block": ("S1: the index", lambda s: s.kv.pool._index.update({b"nothing": 0})),
    "shared unpublished": ("S3: .* shared and not published", share),
    "misnamed": ("S3: .* misnamed", rename),
    "a slot lost": ("S4: slots", lambda s: s._running.append(s._running.pop()) or s._free_slots.append(9)),
    "runs twice": ("S[14]", lambda s: s._running.append(s._running[0])),
    "let go too early": ("S5: .* lacks blocks", let_go),
    "a table too short": ("S5: a table", lambda s: setattr(s._running[0], "num_covered", 10**6)),
    "computed beyond the blocks": ("S5", lambda s: setattr(s._running[0], "num_computed", 10**6)),
    "a host slot lost": ("S12: free and used", lambda s: s.kv.host._free.append(0)),
    "a save for nothing": ("S12: a save", lambda s: s.kv.host._saves.update({99: 0})),
    "a restore left over": ("S12: a restore", lambda s: s.kv.host._restores.update({0: 0})),
    "out of order": ("S11", lambda s: s._running.reverse()),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_named(name: str) -> None:
    expected, violate = VIOLATIONS[name]
    scheduler = busy()
    violate(scheduler)
    with pytest.raises(AssertionError, match=expected):
        check(scheduler)


@pytest.mark.parametrize(
    ("saves", "restores", "expected"),
    [
        ((BlockCopy(0, 1), BlockCopy(1, 1)), (), "S12: a host slot written twice"),
        ((), (BlockCopy(0, 1), BlockCopy(0, 2)), "S12: a block restored twice"),
        ((BlockCopy(0, 4),), (), "S12: a host slot there is not"),
    ],
)
def test_copies_of_a_plan(saves: tuple[BlockCopy, ...], restores: tuple[BlockCopy, ...], expected: str) -> None:
    driver = Driver(capacity(num_host_blocks=4))
    driver.add(request("a", "abcd", 1))
    plan = driver.plan()
    assert plan is not None
    with pytest.raises(AssertionError, match=expected):
        check_plan(driver.scheduler, StepPlan(plan.step_id, plan.sequences, saves, restores))


def test_idle_with_a_block_that_somebody_holds() -> None:
    scheduler = Scheduler(capacity())
    check_idle(scheduler)
    scheduler.kv.pool.allocate()
    with pytest.raises(AssertionError, match="S10: idle with 1 blocks in use"):
        check_idle(scheduler)
