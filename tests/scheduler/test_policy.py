"""The order of admission by policy: keys, ageing, who goes before whom, and how far a cached prefix may jump."""

from __future__ import annotations

import random

import pytest
from driver import Driver, capacity, request

from aserve.scheduler.draft import HASH_BUDGET
from aserve.scheduler.policy import key_function
from aserve.scheduler.prefix_match import PrefixMatcher
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.waiting import SLACK, WaitingQueue, pick_cached


def key(policy: str, step: int, *, arrival: int = 0, priority: int = 0, length: int = 1) -> tuple[int, int]:
    key_of = key_function(policy, aging_steps=10, max_batch_tokens=100)
    return key_of(request("x", (1,) * length, 1, arrival=arrival, priority=priority), step)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prefill"])
def test_equals_go_by_arrival(policy) -> None:
    assert key(policy, 5, arrival=1) < key(policy, 5, arrival=2) < key(policy, 6, arrival=3)


def test_a_level_of_priority_is_worth_so_many_steps() -> None:
    assert key("priority", 0, priority=1) > key("priority", 9, arrival=1)
    assert key("priority", 0, priority=1) < key("priority", 10, arrival=1)
    assert key("priority", 0, priority=-(2**63)) < key("priority", 0, priority=2**63 - 1)


def test_a_prompt_is_worth_the_steps_that_it_fills() -> None:
    assert key("shortest-prefill", 0, length=250) > key("shortest-prefill", 24, arrival=1, length=1)
    assert key("shortest-prefill", 0, length=250) < key("shortest-prefill", 25, arrival=1, length=1)


def order(driver: Driver) -> list[str]:
    return [row.request_id for plan in driver.plans for row in plan.sequences if row.new]


def test_short_prompts_are_admitted_first() -> None:
    driver = Driver(capacity(64, max_num_seqs=1), policy="shortest-prefill")
    for n, length in enumerate([30, 5, 20, 5]):
        driver.add(request(f"{length}-{n}", ("abcdefgh" * 4)[:length], 1, arrival=n))
    driver.finish()
    assert order(driver) == ["5-1", "5-3", "20-2", "30-0"]


def test_who_has_waited_long_enough_goes_before_the_favourites() -> None:
    driver = Driver(capacity(64, max_num_seqs=1), policy="priority", aging_steps=10)
    driver.add(request("low", "abcd", 1, priority=1))
    for n in range(30):
        driver.add(request(f"high{n}", "abcd", 1, arrival=n + 1))
        driver.step()
    driver.finish()
    assert order(driver).index("low") == 10


@pytest.mark.parametrize(("policy", "priority"), [("priority", 5), ("shortest-prefill", 0)])
def test_a_prompt_that_runs_gives_way_to_one_that_comes_first(policy, priority) -> None:
    """A long prompt does not take every step's budget until it is done."""
    driver = Driver(capacity(64, max_batch_tokens=8), policy=policy)
    driver.add(request("long", "abcdefgh" * 8, 2, priority=priority))
    driver.step()
    driver.add(request("short", "abcd", 2, arrival=1))
    plan = driver.plan()
    assert [(row.request_id, len(row.token_ids)) for row in plan.sequences] == [("short", 4), ("long", 4)]
    driver.finish()


def test_by_arrival_a_prompt_that_runs_is_finished_first() -> None:
    driver = Driver(capacity(64, max_batch_tokens=8))
    driver.add(request("long", "abcdefgh" * 8, 2))
    driver.step()
    driver.add(request("short", "abcd", 2, arrival=1))
    assert [row.request_id for row in driver.plan().sequences] == ["long"]
    driver.finish()


def prefix_jumps(lookahead: int, num_later: int) -> list[str]:
    """A batch of one; a prompt that nobody shares arrives, and behind it many whose beginning is cached."""
    driver = Driver(capacity(64, max_num_seqs=1), prefix_lookahead=lookahead)
    driver.add(request("first", "abcdefghijkl", 1))
    driver.finish()
    driver.add(request("alone", "zyxwvutsrq", 1, arrival=1))
    for n in range(num_later):
        driver.add(request(f"r{n}", "abcdefghijkl" + "mnopqrst"[n], 1, arrival=n + 2))
    driver.finish()
    return order(driver)[1:]


def test_a_cached_prefix_goes_first_within_its_bound() -> None:
    assert prefix_jumps(0, 3) == ["alone", "r0", "r1", "r2"]
    assert prefix_jumps(1, 3) == ["r0", "alone", "r1", "r2"]
    assert prefix_jumps(2, 5) == ["r0", "r1", "alone", "r2", "r3", "r4"]
    assert prefix_jumps(8, 5) == ["r0", "r1", "r2", "r3", "r4", "alone"]


def test_a_picked_one_without_room_does_not_hold_up_the_first() -> None:
    driver = Driver(capacity(16, max_batch_tokens=64), prefix_lookahead=1)
    driver.add(request("first", "abcdefghijkl", 1))
    driver.finish()
    driver.add(request("stream", "s" * 16, 28, arrival=1))
    driver.step()
    driver.add(request("small", "zy", 2, arrival=2))
    driver.add(request("big", "abcdefghijkl" + "m" * 32, 2, arrival=3))
    assert [row.request_id for row in driver.plan().sequences] == ["stream", "small"]
    driver.finish()
    assert order(driver) == ["first", "stream", "small", "big"]


def test_one_that_waits_twice_without_room_is_matched_once(monkeypatch) -> None:
    """Neither the first nor the one that is picked before it costs a search in every step."""
    driver = Driver(capacity(16, max_batch_tokens=64), prefix_lookahead=1)
    driver.add(request("first", "abcdefghijkl", 1))
    driver.finish()
    driver.add(request("stream", "s" * 16, 28, arrival=1))
    driver.step()
    driver.add(request("other", "z" * 48, 2, arrival=2))
    driver.add(request("big", "abcdefghijkl" + "m" * 36, 2, arrival=3))
    matched: list[str] = []
    match = PrefixMatcher.match

    def counted(self, sequence):
        matched.append(sequence.request.request_id)
        return match(self, sequence)

    monkeypatch.setattr(PrefixMatcher, "match", counted)
    for _ in range(10):
        driver.step()
    assert sorted(matched) == ["big", "other"]
    driver.finish()


def test_a_prompt_that_runs_gives_way_to_nobody_behind_it_for_a_cached_prefix() -> None:
    driver = Driver(capacity(64, max_batch_tokens=8), policy="priority", prefix_lookahead=1)
    driver.add(request("first", "abcdefgh", 1))
    driver.finish()
    driver.add(request("long", "zyxwvuts" * 8, 2, arrival=1, priority=1))
    driver.step()
    driver.add(request("urgent", "mnop", 2, arrival=2))
    driver.add(request("behind", "abcdefghijkl", 2, arrival=3, priority=9))
    assert [row.request_id for row in driver.plan().sequences] == ["urgent", "long"]
    driver.finish()


def test_hashes_of_those_behind_do_not_hold_up_the_first() -> None:
    shared = tuple(range(1000, 1000 + 2 * HASH_BUDGET))
    driver = Driver(capacity(2000, 1, max_batch_tokens=2000), prefix_lookahead=1)
    driver.add(request("first", shared, 1))
    driver.finish()
    driver.add(request("stream", "abcd", 20, arrival=1))
    driver.step()
    driver.add(request("small", "zy", 2, arrival=2))
    driver.add(request("big", (*shared, 5), 2, arrival=3))
    assert [row.request_id for row in driver.plan().sequences] == ["stream", "small"]
    driver.finish()


def sequence(number: int, policy_key: tuple[int, int]) -> Sequence:
    return Sequence(request(f"s{number}", "a", 1, arrival=number), policy_key)


@pytest.mark.parametrize("front_size", [1, 2, 5])
def test_the_front_of_the_queue_is_its_first_whatever_comes_and_goes(front_size) -> None:
    rng = random.Random(front_size)
    queue, expected = WaitingQueue(front_size), []
    for number in range(3000):
        if rng.random() < 0.55 or not expected:
            added = sequence(number, (rng.randrange(50), number))
            queue.add(added)
            expected.append(added)
            expected.sort(key=lambda s: s.key)
        elif rng.random() < 0.5:
            gone = rng.choice(expected)
            gone.cancelled = True
            queue.drop()
            expected.remove(gone)
        else:
            taken = rng.choice(queue.front())
            queue.remove(taken)
            expected.remove(taken)
        if rng.random() < 0.7:
            assert queue.front() == expected[:front_size]
        assert len(queue) == len(expected)
        assert queue.num_entries <= 2 * len(expected) + SLACK
    assert sorted(queue, key=lambda s: s.key) == expected


def test_the_most_cached_is_picked_and_the_first_of_equals() -> None:
    front = [sequence(n, (0, n)) for n in range(4)]
    cached = dict(zip(front, [1, 5, 5, 9], strict=True))
    assert pick_cached(front, cached.__getitem__, 2) == 3
    front[2].num_overtaken = 2
    assert pick_cached(front, cached.__getitem__, 2) == 1
    front[1].num_pending = 1
    assert pick_cached(front, cached.__getitem__, 2) == 2
    front[0].num_pending = 1
    assert pick_cached(front, cached.__getitem__, 2) == 0
