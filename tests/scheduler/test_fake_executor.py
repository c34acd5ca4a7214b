"""The shipped double: a program that embeds aserve sees in its text when blocks are mixed up."""

from __future__ import annotations

import pytest
from driver import capacity, request

from aserve.core.capacity import Capacity
from aserve.core.request import Request
from aserve.scheduler import Scheduler
from aserve.testing import FakeExecutor, hash_letter


def generate(scheduler: Scheduler, executor: FakeExecutor, requests: list[Request]) -> dict[str, list[int]]:
    for item in requests:
        scheduler.add(item)
    tokens: dict[str, list[int]] = {item.request_id: [] for item in requests}
    while (plan := scheduler.plan()) is not None:
        executor.submit(plan)
        for event in scheduler.commit(executor.wait()):
            tokens[event.request_id].append(event.token_id)
    return tokens


def alone(item: Request) -> list[int]:
    tokens = list(item.prompt_token_ids)
    for _ in range(item.sampling.max_tokens):
        tokens.append(hash_letter(tokens, 0))
    return tokens[len(item.prompt_token_ids) :]


SIZES = [capacity(10, 4), capacity(18, 4, windows=(None, 5, 9)), capacity(8, 4, windows=(6,), max_num_seqs=2)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size.windows))
def test_a_full_cache_with_windows_and_host_memory_changes_no_text(size: Capacity) -> None:
    size = capacity(
        size.num_blocks, size.block_size, max_num_seqs=size.max_num_seqs, windows=size.windows, num_host_blocks=12
    )
    scheduler, executor = Scheduler(size), FakeExecutor(size)
    for turn in range(3):
        requests = [request(f"{turn}-{n}", "abcdefghijklmnop"[: 8 + 4 * (n % 3)], 9, arrival=n) for n in range(5)]
        assert generate(scheduler, executor, requests) == {item.request_id: alone(item) for item in requests}
        requests = [request(f"{turn}+{n}", "zyxwvutsrqpo"[n:], 9, arrival=n) for n in range(5)]
        assert generate(scheduler, executor, requests) == {item.request_id: alone(item) for item in requests}
    stats = scheduler.stats()
    assert stats.num_host_hits
    assert stats.num_restored_tokens >= 4 * stats.num_host_hits


@pytest.mark.parametrize("group", [0, 1])
def test_wrong_content_of_any_group_changes_the_text(group: int) -> None:
    size = capacity(18, 4, windows=(None, 9))
    scheduler, executor = Scheduler(size), FakeExecutor(size)
    item = request("a", "abcdefgh", 4)
    scheduler.add(item)
    plan = scheduler.plan()
    assert plan is not None
    executor.submit(plan)
    (first,) = scheduler.commit(executor.wait())
    executor._cache[plan.sequences[0].new_block_ids[group][0]][1] = 0
    plan = scheduler.plan()
    assert plan is not None
    executor.submit(plan)
    (second,) = scheduler.commit(executor.wait())
    assert [first.token_id, second.token_id] != alone(item)[:2]
