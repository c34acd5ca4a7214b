"""What looking for prefixes costs: hashes in pieces beside a running batch, and no second look without a reason."""

from __future__ import annotations

import pytest
from driver import Driver, capacity, request

from aserve.scheduler.draft import HASH_BUDGET
from aserve.scheduler.prefix_match import PrefixMatcher

LONG = tuple(range(1000, 1000 + 2 * HASH_BUDGET + 100))


@pytest.fixture
def matches(monkeypatch):
    """The ids of the sequences that are matched, in order."""
    seen: list[str] = []
    match = PrefixMatcher.match

    def counted(self, sequence):
        seen.append(sequence.request.request_id)
        return match(self, sequence)

    monkeypatch.setattr(PrefixMatcher, "match", counted)
    return seen


def cached(driver: Driver) -> None:
    """Put the long prompt into the prefix cache."""
    driver.add(request("first", LONG, 1))
    driver.finish()


def hashed(driver: Driver, name: str) -> int:
    return len(driver.scheduler._live[name].block_hashes)


def test_a_running_batch_does_not_stand_still_for_a_long_prompts_hashes() -> None:
    driver = Driver(capacity(2000, 1, max_batch_tokens=2000))
    cached(driver)
    driver.add(request("stream", "abcd", 20, arrival=1))
    driver.step()
    driver.add(request("long", LONG, 2, arrival=2))
    for step in (1, 2):
        plan = driver.plan()
        assert [row.request_id for row in plan.sequences] == ["stream"]
        assert hashed(driver, "long") == step * HASH_BUDGET
        driver.commit()
    plan = driver.plan()
    assert [(row.request_id, row.start) for row in plan.sequences] == [("stream", 6), ("long", len(LONG) - 1)]
    driver.finish()


def test_with_nobody_to_hold_up_hashes_are_made_at_once() -> None:
    driver = Driver(capacity(2000, 1, max_batch_tokens=2000))
    cached(driver)
    driver.add(request("long", LONG, 2, arrival=1))
    assert driver.plan().sequences[0].start == len(LONG) - 1
    driver.finish()


def test_hashes_are_ready_when_a_slot_comes_free() -> None:
    driver = Driver(capacity(2000, 1, max_num_seqs=1, max_batch_tokens=2000))
    cached(driver)
    driver.add(request("stream", "abcd", 10, arrival=1))
    driver.step()
    driver.add(request("long", LONG, 2, arrival=2))
    for _ in range(4):
        driver.step()
    assert hashed(driver, "long") == len(LONG) - 1
    driver.finish()


def test_what_is_not_cached_is_not_hashed() -> None:
    driver = Driver(capacity(2000, 1, max_num_seqs=1, max_batch_tokens=2000))
    driver.add(request("stream", "abcd", 10))
    driver.step()
    driver.add(request("long", LONG, 2, arrival=1))
    for _ in range(5):
        driver.step()
    assert hashed(driver, "long") < 100
    driver.finish()


def test_a_request_without_room_is_matched_once(matches) -> None:
    driver = Driver(capacity(12, 4, max_batch_tokens=64))
    driver.add(request("stream", "abcd", 36))
    driver.step()
    driver.add(request("big", "z" * 40, 2, arrival=1))
    for _ in range(30):
        driver.step()
        assert driver.scheduler.stats().num_waiting == 1
    assert matches.count("big") == 1
    driver.finish()


def test_a_request_without_room_is_matched_again_when_its_prefix_appears(matches) -> None:
    """Another request computes its beginning meanwhile: what that one holds, it need not have room for."""
    driver = Driver(capacity(20, 4, max_batch_tokens=64, max_in_flight=2))
    driver.add(request("stream", "abcd", 40))
    driver.step()
    driver.add(request("first", "z" * 40, 24, arrival=1))
    driver.add(request("second", "z" * 40 + "yyyy", 2, arrival=2))
    waited = 0
    while driver.scheduler.stats().num_waiting:
        driver.step()
        waited += 1
        assert "first" in driver.live(), "it waited until the blocks of the other were free"
    assert waited < 5
    assert matches.count("second") == 2
    assert driver.scheduler._live["second"].num_cached_tokens > 20
    driver.finish()


def test_a_revived_prefix_counts_as_room() -> None:
    """Blocks that were free when a request was refused, and that another holds now, need no room any more."""
    driver = Driver(capacity(20, 4, max_batch_tokens=64), policy="priority")
    driver.add(request("past", "z" * 40, 1))
    driver.finish()
    driver.add(request("stream", "abcd" * 5, 8, arrival=1))
    driver.step()
    driver.add(request("big", "z" * 40 + "y" * 20, 2, arrival=2, priority=5))
    driver.step()
    driver.add(request("urgent", "z" * 40 + "u", 20, arrival=3))
    for _ in range(12):
        driver.step()
    assert "stream" not in driver.live()
    assert "urgent" in driver.live()
    assert driver.events["big"], "it waited although there was room"
    driver.finish()


def computed_tokens(driver: Driver) -> int:
    return sum(len(row.token_ids) for plan in driver.plans for row in plan.sequences)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
def test_prompts_that_come_at_once_share_what_they_have_in_common(depth: int, windows: tuple[int | None, ...]) -> None:
    """Choices of one prompt: it is computed once, and of the others the last, part block."""
    driver = Driver(capacity(200, max_batch_tokens=200, max_num_seqs=8, max_in_flight=depth, windows=windows))
    for number in range(8):
        driver.add(request(f"choice{number}", "abcdefgh" * 5 + "xy", 1, arrival=number))
    driver.finish()
    assert computed_tokens(driver) == 42 + 7 * 2


def test_a_prompt_does_not_wait_for_a_small_part_of_it() -> None:
    """The first four of sixty tokens are being computed; the prompt starts in the same step all the same."""
    driver = Driver(capacity(200, max_batch_tokens=200, max_num_seqs=8))
    driver.add(request("a", "abcd" + "x" * 60, 1))
    driver.add(request("b", "abcd" + "y" * 60, 1, arrival=1))
    plan = driver.plan()
    assert plan is not None
    assert [row.request_id for row in plan.sequences] == ["a", "b"]
    driver.finish()


def test_who_waits_for_a_prompt_that_is_cancelled_computes_it() -> None:
    driver = Driver(capacity(200, max_batch_tokens=200, max_num_seqs=8, max_in_flight=2))
    driver.add(request("a", "abcdefgh" * 5, 9))
    driver.add(request("b", "abcdefgh" * 5, 1, arrival=1))
    driver.plan()
    driver.cancel("a")
    assert driver.plan() is None
    driver.finish()
    assert computed_tokens(driver) == 80
