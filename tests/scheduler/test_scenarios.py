"""Readable cases: what a plan contains, who waits, who is sent back, and what comes out."""

from __future__ import annotations

from collections import deque

import pytest
from driver import Driver, capacity, isolated, request

from aserve.core.request import FinishReason, Request, SamplingParams
from aserve.core.step import INVALID_TOKEN, PENDING, StepResult
from aserve.scheduler import Scheduler, check


def rows(driver: Driver) -> list[tuple[str, int, int, bool]]:
    """The next plan as (request, start, tokens, samples)."""
    plan = driver.plan()
    assert plan is not None
    return [(r.request_id, r.start, len(r.token_ids), r.samples) for r in plan.sequences]


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    driver = Driver(capacity(max_batch_tokens=8))
    driver.add(request("a", "abcdefghij" * 2, 3))
    assert rows(driver) == [("a", 0, 8, False)]
    driver.commit()
    assert rows(driver) == [("a", 8, 8, False)]
    driver.commit()
    assert rows(driver) == [("a", 16, 4, True)]
    driver.commit()
    assert rows(driver) == [("a", 20, 1, True)]
    driver.finish()


def test_decodes_go_before_prefill_chunks() -> None:
    """A long prompt gets what the running streams leave of the budget, never the other way round."""
    driver = Driver(capacity(32, max_batch_tokens=8))
    driver.add(request("stream", "abcd", 20))
    driver.step()
    driver.add(request("long", "z" * 40, 2, arrival=1))
    for start in (0, 7, 14, 21, 28):
        got = rows(driver)
        assert got[0][0] == "stream"
        assert got[0][2] == 1
        assert got[1] == ("long", start, 7, False)
        driver.commit()
    driver.finish()


def test_several_prompts_share_a_step() -> None:
    driver = Driver(capacity(max_batch_tokens=10))
    for n, name in enumerate("abc"):
        driver.add(request(name, f"{name}xyz", 2, arrival=n))
    assert rows(driver) == [("a", 0, 4, True), ("b", 0, 4, True), ("c", 0, 2, False)]
    driver.finish()


def test_the_next_step_is_planned_before_the_token_is_known() -> None:
    driver = Driver(capacity(max_in_flight=2))
    driver.add(request("a", "abcd", 5))
    driver.plan()
    second = driver.plan()
    assert second is not None
    assert second.sequences[0].token_ids == (PENDING,)
    assert driver.scheduler.plan() is None, "a third step in flight"
    driver.finish()


def test_a_row_with_a_grammar_waits_for_its_last_token_and_the_others_go_on() -> None:
    driver = Driver(capacity(max_in_flight=2))
    driver.add(request("free", "abc", 9))
    driver.add(request("bound", "abx", 9, arrival=1, constrained=True))
    rows = [{row.request_id: row.token_ids for row in driver.plan().sequences} for _ in range(2)]
    assert rows[0].keys() == {"free", "bound"}
    assert rows[1] == {"free": (PENDING,)}
    (first,) = [event.token_id for event in driver.commit() if event.request_id == "bound"]
    assert {row.request_id: row.token_ids for row in driver.plan().sequences} == {"free": (PENDING,), "bound": (first,)}
    driver.finish()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_complete_grammar_ends_its_sequence_with_a_token_of_the_text(depth: int) -> None:
    driver = Driver(capacity(max_in_flight=depth))
    names = [f"r{i}" for i in range(6)]
    for arrival, name in enumerate(names):
        driver.add(request(name, name * 3, 20, arrival=arrival, constrained=True))
    driver.finish()
    completed = [name for name in names if driver.events[name][-1].completes]
    assert completed, "some were complete before their limit"
    for name in completed:
        assert driver.events[name][-1].finish_reason == FinishReason.STOP
    assert not any(event.completes for name in names for event in driver.events[name][:-1])


def test_no_step_is_planned_beyond_the_limit_while_tokens_are_pending() -> None:
    """With two steps in flight a request of two tokens still takes exactly two rows."""
    driver = Driver(capacity(max_in_flight=2))
    driver.add(request("a", "abcd", 2))
    driver.finish()
    assert sum(len(p.sequences) for p in driver.plans) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_the_youngest_is_sent_back_when_blocks_run_out(depth: int) -> None:
    driver = Driver(capacity(6, 4, max_batch_tokens=64, max_in_flight=depth))
    driver.add(request("old", "abcdefgh", 12))
    driver.add(request("young", "12345678", 12, arrival=1))
    driver.finish()
    assert driver.scheduler.stats().num_preemptions >= 1
    last = [name for plan in driver.plans for name in (row.request_id for row in plan.sequences)][-1]
    assert last == "young", "the older request was held up by the younger one"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("num_blocks", [2, 3, 5])
def test_one_request_grows_to_the_exact_end_of_the_cache(num_blocks: int, block_size: int, depth: int) -> None:
    size = capacity(num_blocks, block_size, max_in_flight=depth)
    driver = Driver(size)
    driver.add(request("a", "a", size.max_length - 1))
    driver.finish()
    assert len(driver.events["a"]) == size.max_length - 1
    assert driver.events["a"][-1].finish_reason == FinishReason.LENGTH


def test_a_request_behind_one_that_waits_for_space_keeps_its_place() -> None:
    driver = Driver(capacity(8, 4, max_batch_tokens=64))
    driver.add(request("first", "a" * 20, 8))
    driver.step()
    driver.add(request("big", "b" * 24, 2, arrival=1))
    driver.add(request("small", "c", 2, arrival=2))
    driver.step()
    assert driver.scheduler.stats().num_waiting == 2
    driver.finish()
    order = [row.request_id for plan in driver.plans for row in plan.sequences if row.new]
    assert order == ["first", "big", "small"]


def test_priority_goes_first_and_equal_priorities_by_arrival() -> None:
    driver = Driver(capacity(32, max_num_seqs=1), policy="priority")
    for n, (name, priority) in enumerate([("c", 5), ("a", 1), ("d", 5), ("b", 1)]):
        driver.add(request(name, name, 1, arrival=n, priority=priority))
    driver.finish()
    assert [row.request_id for plan in driver.plans for row in plan.sequences] == ["a", "b", "c", "d"]


def test_a_cached_prefix_is_not_computed_again() -> None:
    driver = Driver(capacity(16, 4, max_batch_tokens=64))
    driver.add(request("a", "abcdefghijkl", 1))
    driver.finish()
    driver.add(request("b", "abcdefghijXY", 1, arrival=1))
    assert rows(driver) == [("b", 8, 4, True)]
    driver.finish()
    assert driver.events["b"][0].num_cached_tokens == 8
    assert driver.events["a"][0].num_cached_tokens == 0


def test_a_wholly_cached_prompt_still_computes_its_last_token() -> None:
    driver = Driver(capacity(16, 4, max_batch_tokens=64))
    for n, name in enumerate("ab"):
        driver.add(request(name, "abcdefgh", 2, arrival=n))
        driver.finish()
    assert driver.events["b"][0].num_cached_tokens == 4


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    driver = Driver(capacity(16, 4, max_batch_tokens=64))
    driver.add(request("a", "abcd", 8))
    driver.finish()
    turn = tuple(b"abcd") + tuple(isolated(driver.requests["a"])[0]) + tuple(b"next")
    driver.add(request("b", turn, 2, arrival=1))
    driver.finish()
    assert driver.events["b"][0].num_cached_tokens == 8  # 11 of 12 tokens were computed: two full blocks


def test_another_salt_shares_nothing() -> None:
    driver = Driver(capacity(16, 4, max_batch_tokens=64))
    driver.add(request("a", "abcdefgh", 1, salt=b"tenant 1"))
    driver.finish()
    driver.add(request("b", "abcdefgh", 1, arrival=1, salt=b"tenant 2"))
    driver.finish()
    assert driver.events["b"][0].num_cached_tokens == 0


def test_prefixes_are_evicted_least_recently_used_first() -> None:
    driver = Driver(capacity(4, 4, max_batch_tokens=64))
    for n, prompt in enumerate(["aaaaaaaa", "bbbbbbbb", "aaaaaaaa", "cccccccc"]):
        driver.add(request(f"r{n}", prompt, 1, arrival=n))
        driver.finish()
    for n, (prompt, cached) in enumerate([("aaaaaaaa", 4), ("bbbbbbbb", 0)], start=4):
        driver.add(request(f"r{n}", prompt, 1, arrival=n))
        driver.finish()
        assert driver.events[f"r{n}"][0].num_cached_tokens == cached, prompt


def test_stop_tokens_count_only_after_min_tokens() -> None:
    driver = Driver(capacity(64, max_batch_tokens=64))
    every_letter = tuple(range(97, 123))
    driver.add(request("a", "abcd", 10, stop=every_letter))
    driver.add(request("b", "abcd", 10, arrival=1, stop=every_letter, min_tokens=3))
    driver.finish()
    assert len(driver.events["a"]) == 1
    assert len(driver.events["b"]) == 4


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("depth", [1, 2])
def test_cancel_gives_everything_back_within_the_steps_in_flight(steps: int, depth: int) -> None:
    driver = Driver(capacity(16, 4, max_batch_tokens=5, max_in_flight=depth))
    driver.add(request("a", "abcdefghijk", 10))
    for _ in range(steps):
        driver.plan() or driver.commit()
    driver.cancel("a")
    while driver.in_flight:
        driver.commit()
    assert driver.scheduler.stats().num_used_blocks == 0
    assert not driver.scheduler.has_work


def test_logits_that_are_not_finite_end_one_sequence_only() -> None:
    scheduler = Scheduler(capacity(max_batch_tokens=64))
    for n, name in enumerate("ab"):
        scheduler.add(request(name, "abcd", 3, arrival=n))
    plan = scheduler.plan()
    assert plan is not None
    events = scheduler.commit(StepResult(plan.step_id, (INVALID_TOKEN, 97)))
    assert [(e.request_id, e.finish_reason) for e in events] == [("a", FinishReason.ERROR), ("b", None)]
    check(scheduler)
    assert scheduler.stats().num_running == 1


def test_the_same_calls_give_the_same_plans() -> None:
    """S8: nothing depends on hashing order, identity or time."""

    def plans() -> list[object]:
        driver = Driver(capacity(7, 3, max_num_seqs=3, max_batch_tokens=9, max_in_flight=2))
        for n in range(8):
            driver.add(request(f"r{n}", "abcabcabcabc"[: n + 2], 5, arrival=n))
            driver.plan()
            if n % 3 == 2:
                driver.cancel(f"r{n - 1}")
            if driver.in_flight:
                driver.commit()
        driver.finish()
        return list(driver.plans)

    assert plans() == plans()


def test_a_request_that_cannot_fit_is_a_mistake_of_the_caller() -> None:
    scheduler = Scheduler(capacity(2, 4))
    with pytest.raises(AssertionError, match="never fit"):
        scheduler.add(Request(request_id="a", prompt_token_ids=(1,) * 7, sampling=SamplingParams(max_tokens=2)))


def test_idle_means_no_plan() -> None:
    scheduler = Scheduler(capacity())
    assert scheduler.plan() is None
    assert not scheduler.has_work


def test_cancelled_requests_do_not_pile_up_in_the_queue() -> None:
    """On a server whose slots are all busy, requests that come and go leave nothing behind."""
    driver = Driver(capacity(64, max_num_seqs=1))
    driver.add(request("busy", "abcd", 100))
    driver.step()
    for n in range(200):
        driver.add(request(f"r{n}", "abcd", 5, arrival=n + 1))
        driver.cancel(f"r{n}")
    assert driver.scheduler._waiting.num_entries < 50
    driver.finish()


@pytest.mark.parametrize("others", [0, 1])
def test_kv_of_a_failed_sequence_is_not_reused(others: int) -> None:
    """Logits that are not finite come from KV that may not be finite either."""
    scheduler = Scheduler(capacity(max_batch_tokens=64))
    for n in range(1 + others):
        scheduler.add(request(f"r{n}", "abcdefghijkl", 3, arrival=n))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(StepResult(plan.step_id, (INVALID_TOKEN,) * (1 + others)))
    check(scheduler)
    scheduler.add(request("again", "abcdefghijkl", 1, arrival=9))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.sequences[0].start == 0


def test_a_shared_prefix_of_a_failed_sequence_serves_those_who_hold_it_only() -> None:
    driver = Driver(capacity(16, 4, max_batch_tokens=64))
    driver.add(request("first", "abcdefgh", 1))
    driver.finish()
    scheduler = driver.scheduler
    for n, name in enumerate(["bad", "good"]):
        scheduler.add(request(name, "abcdefgh" + name, 3, arrival=n + 1))
    plan = scheduler.plan()
    assert plan is not None
    assert [row.start for row in plan.sequences] == [8, 8]
    scheduler.commit(StepResult(plan.step_id, (INVALID_TOKEN, 97)))
    check(scheduler)
    assert scheduler.stats().num_running == 1
    scheduler.add(request("next", "abcdefgh", 1, arrival=3))
    plan = scheduler.plan()
    assert plan is not None
    assert [(row.request_id, row.start) for row in plan.sequences] == [("good", 11 + 1), ("next", 0)]


def test_readers_that_overlap_do_not_keep_a_poisoned_prefix() -> None:
    """Everyone who reads it fails, and whenever one does, the next holds it already."""
    # with a budget of so many tokens, nobody waits for the few that another computes
    scheduler = Scheduler(capacity(32, 4, max_batch_tokens=256, max_in_flight=2))
    scheduler.add(request("r0", "abcdefgh", 1))
    plan = scheduler.plan()
    assert plan is not None
    poisoned = set(plan.sequences[0].new_block_ids[0])
    scheduler.commit(StepResult(plan.step_id, (97,)))
    results: deque[StepResult] = deque()
    failed: list[str] = []
    for number in range(1, 8):
        name = f"r{number}"
        scheduler.add(request(name, "abcdefgh" + "x" * number, 1, arrival=number))
        plan = scheduler.plan()
        assert plan is not None
        (row,) = plan.sequences
        blocks = row.new_block_ids[0]
        poisoned -= set(blocks[row.start // 4 :])  # written anew
        fails = bool(poisoned & set(blocks))
        failed += [name] * fails
        results.append(StepResult(plan.step_id, (INVALID_TOKEN if fails else 97,)))
        if len(results) == 2:
            scheduler.commit(results.popleft())
            check(scheduler)
    assert failed == ["r1", "r2"]
