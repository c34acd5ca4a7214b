"""Host memory behind the KV cache: what is saved, what comes back, and what must never come back."""

from __future__ import annotations

from driver import Driver, capacity, request

from aserve.core.step import BlockCopy, StepPlan
from aserve.scheduler.host_cache import HostCache

PROMPT = "abcdefghijkl"


def evicted(**changes: object) -> Driver:
    """A driver whose cache has given up the prompt's prefix for two others."""
    driver = Driver(capacity(6, 4, max_batch_tokens=64, num_host_blocks=20), **changes)
    run(driver, "first", PROMPT)
    run(driver, "x", "0123456789abcdefghijklm", arrival=1)
    return driver


def run(driver: Driver, name: str, prompt: str, *, arrival: int = 0) -> list[StepPlan]:
    before = len(driver.plans)
    driver.add(request(name, prompt, 1, arrival=arrival))
    driver.finish()
    return driver.plans[before:]


def cached(driver: Driver, name: str) -> int:
    return driver.events[name][0].num_cached_tokens


def test_an_evicted_prefix_comes_back_from_the_host() -> None:
    driver = evicted()
    saved = [copy for plan in driver.plans for copy in plan.saves]
    assert len(saved) == 3
    plans = run(driver, "again", PROMPT, arrival=2)
    assert len(plans[0].restores) == 2
    assert {copy.host_slot for copy in plans[0].restores} <= {copy.host_slot for copy in saved}
    assert cached(driver, "again") == 8
    stats = driver.scheduler.stats()
    assert (stats.num_host_hits, stats.num_restored_tokens) == (1, 8)


def test_what_is_on_the_host_is_not_saved_again() -> None:
    driver = evicted()
    run(driver, "again", PROMPT, arrival=2)
    num_saved = sum(len(plan.saves) for plan in driver.plans)
    run(driver, "y", "0123456789abcdefghijklm", arrival=3)
    run(driver, "z", "ABCDEFGHIJKLMNOPQRSTUVW", arrival=4)
    saved = [copy.host_slot for plan in driver.plans for copy in plan.saves]
    assert len(saved) == len(set(saved)) > num_saved
    assert len(saved) <= 3 + 5 + 5  # of each prompt what was computed in full


def test_only_the_missing_part_of_a_prefix_is_restored() -> None:
    driver = Driver(capacity(8, 4, max_batch_tokens=64, num_host_blocks=20))
    run(driver, "first", PROMPT + "mnop")
    pool = driver.scheduler.kv.pool
    taken = [pool.allocate() for _ in range(6)]
    pool.release(taken[-1])
    for block_id in taken[:-1]:
        pool.release(block_id)
    plans = run(driver, "again", PROMPT + "mnopq", arrival=1)
    assert 0 < len(plans[0].restores) < 4
    assert cached(driver, "again") == 16


def test_a_reset_forgets_the_host_as_well() -> None:
    driver = evicted()
    driver.reset()
    plans = run(driver, "again", PROMPT, arrival=2)
    assert not any(plan.restores for plan in plans)
    assert cached(driver, "again") == 0


def test_what_runs_during_a_reset_is_never_matched_later() -> None:
    driver = Driver(capacity(20, 4, max_batch_tokens=64))
    driver.add(request("old", PROMPT, 12))
    driver.step()
    driver.reset()
    driver.finish()
    run(driver, "new", PROMPT, arrival=1)
    assert cached(driver, "new") == 0
    run(driver, "newer", PROMPT, arrival=2)
    assert cached(driver, "newer") == 8


def test_the_host_gives_back_nothing_of_a_failed_request() -> None:
    """What it read may be the fault, wherever it was kept."""
    driver = evicted()
    driver.fail("again")
    run(driver, "again", PROMPT, arrival=2)
    assert driver.failed == {"again"}
    plans = run(driver, "third", PROMPT, arrival=3)
    assert cached(driver, "third") == 0
    assert not any(plan.restores for plan in plans)


def test_a_failure_in_flight_counts_though_the_request_is_cancelled() -> None:
    driver = Driver(capacity(20, 4, max_batch_tokens=64))
    driver.add(request("bad", "abcdefgh", 4))
    driver.step()
    driver.fail("bad")
    driver.plan()
    driver.cancel("bad")
    driver.commit()
    run(driver, "next", "abcdefghij", arrival=1)
    assert cached(driver, "next") == 0


def test_a_failure_in_flight_counts_though_the_request_is_preempted() -> None:
    num_seen = 0
    for num_steps in range(12):
        driver = Driver(capacity(5, 4, max_batch_tokens=64, max_in_flight=2))
        driver.add(request("ahead", "012345", 4))
        driver.add(request("bad", "abcdefgh", 4, arrival=1))
        for _ in range(num_steps):
            driver.step()
        if "bad" not in driver.live():
            break
        driver.fail("bad")
        while not driver.failed and not driver.finished("bad"):
            preempted = driver.scheduler.stats().num_waiting
            driver.step()
        num_seen += bool(driver.failed and preempted)
        run(driver, "next", "abcdefghij", arrival=2)
        assert cached(driver, "next") == 0
    assert num_seen, "no step failed a request that had been preempted meanwhile"


def test_saves_of_a_plan_that_never_was_go_with_the_next() -> None:
    host = HostCache(2)
    host.save(b"a", 7)
    assert host.take_copies() == ((BlockCopy(7, 0),), ())
    assert host.take_copies() == ((), ())


def test_a_plan_writes_no_host_slot_twice() -> None:
    host = HostCache(1)
    host.save(b"a", 7)
    host.save(b"b", 8)
    assert b"a" not in host
    assert host.take_copies() == ((BlockCopy(8, 0),), ())


def test_a_slot_that_a_plan_reads_is_not_written_by_it() -> None:
    host = HostCache(1)
    host.save(b"a", 7)
    host.take_copies()
    host.pin(b"a")
    host.save(b"b", 8)  # the block that is about to be filled held b
    host.restore(b"a", 8)
    assert b"b" not in host
    assert host.take_copies() == ((), (BlockCopy(8, 0),))
    host.save(b"b", 9)
    assert b"a" not in host


def test_a_slot_may_be_read_by_the_plan_that_writes_it() -> None:
    host = HostCache(2)
    host.save(b"a", 7)
    host.pin(b"a")
    host.restore(b"a", 3)
    assert host.take_copies() == ((BlockCopy(7, 0),), (BlockCopy(3, 0),))


def test_a_block_that_never_received_its_content_is_not_saved() -> None:
    """A block that was to be restored is given away again before the plan is made: the host has its content still."""
    host = HostCache(4)
    host.save(b"a", 7)
    host.take_copies()
    host.pin(b"a")
    host.restore(b"a", 3)
    host.save(b"a", 3)
    assert host.take_copies() == ((), ())
    assert b"a" in host


def test_host_slots_are_reused_least_recently_used_first() -> None:
    host = HostCache(2)
    for block_id, key in enumerate([b"a", b"b", b"a", b"c"]):
        host.save(key, block_id)
    assert b"a" in host
    assert b"b" not in host
    host.forget(b"a")
    host.save(b"d", 9)
    assert host.num_used == 2


def test_without_slots_nothing_is_kept() -> None:
    host = HostCache(0)
    host.save(b"a", 1)
    assert host.take_copies() == ((), ())
    assert b"a" not in host
