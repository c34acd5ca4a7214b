"""A prompt's chunks get smaller as their context grows, while there are streams that would wait for a long step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from driver import Driver, capacity, request
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.capacity import Capacity
from aserve.scheduler.context_cost import ContextCost


def long(num_tokens: int, name: str = "long", *, first: str = "z"):
    return request(name, first + "y" * (num_tokens - 1), 1, arrival=len(name))


def chunks(driver: Driver) -> Iterator[dict[str, int]]:
    """Tokens per request and step, but for the streams, until all long prompts are done."""
    while driver.plan():
        lengths = {r.request_id: len(r.token_ids) for r in driver.plans[-1].sequences if r.request_id != "stream"}
        driver.commit()
        if not lengths:
            return
        yield lengths


def driver_with_stream(*, windows: tuple[int | None, ...] = (None,), parity: int | None = 16) -> Driver:
    driver = Driver(capacity(400, max_batch_tokens=33, windows=windows, parity_context=parity))
    driver.add(request("stream", "abcd", 60))
    driver.step()
    return driver


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        # 32 tokens beside the stream; at context 32 each costs 1 + 32/16
        ((None,), [32, 10, 8, 7, 7, 6, 5, 5]),
        # half of the layers see 8 tokens: 1 + (32 + 8)/2/16
        ((None, 8), [32, 14, 11, 10, 9, 4]),
        # all of them do: 1 + 8/16, however long the prompt
        ((8,), [32, 21, 21, 6]),
    ],
)
def test_chunks_pay_for_their_context(windows: tuple[int | None, ...], expected: list[int]) -> None:
    driver = driver_with_stream(windows=windows)
    driver.add(long(80))
    assert [lengths["long"] for lengths in chunks(driver)] == expected
    driver.finish()


def test_context_is_free_where_the_model_says_so() -> None:
    driver = driver_with_stream(parity=None)
    driver.add(long(80))
    assert [lengths["long"] for lengths in chunks(driver)] == [32, 32, 16]


def test_what_one_prompt_leaves_goes_to_the_next() -> None:
    """Rounding and the last chunk of a prompt leave some of the budget; context counts in the other prompt, too."""
    driver = driver_with_stream()
    driver.add(long(40))
    driver.add(long(40, "second", first="w"))
    # the last 8 of the first take 24 of 32; then at context 8 a token takes 1 + 8/16
    assert list(chunks(driver)) == [{"long": 32}, {"long": 8, "second": 8}, {"second": 21}, {"second": 11}]
    driver.finish()


def test_a_cached_prefix_is_context() -> None:
    driver = driver_with_stream()
    driver.add(long(65))
    list(chunks(driver))
    driver.add(long(80, "again"))
    assert next(chunks(driver)) == {"again": 6}  # 64 tokens are cached: 32 / (1 + 64/16)
    driver.finish()


def test_alone_a_prompt_gets_the_whole_budget() -> None:
    """Nobody waits for its steps, and small ones would only cost time."""
    driver = Driver(capacity(400, max_batch_tokens=33, parity_context=1))
    driver.add(long(100))
    assert list(chunks(driver)) == [{"long": 33}, {"long": 33}, {"long": 33}, {"long": 1}]
    driver.finish()


def test_however_dear_a_token_a_prompt_gets_on() -> None:
    driver = Driver(capacity(400, max_batch_tokens=2, parity_context=1))
    driver.add(request("stream", "abcd", 60))
    driver.step()
    driver.step()
    driver.step()
    driver.add(long(20))
    assert [lengths["long"] for lengths in chunks(driver)] == [1] * 20
    driver.finish()


CAPACITIES = st.builds(
    Capacity,
    num_blocks=st.just(100),
    block_size=st.just(4),
    max_num_seqs=st.just(4),
    max_batch_tokens=st.just(8),
    max_model_len=st.just(64),
    windows=st.lists(st.none() | st.integers(1, 300), min_size=1, max_size=4).map(tuple),
    parity_context=st.none() | st.integers(1, 10**5),
)


@given(size=CAPACITIES, start=st.integers(0, 10**6), budget=st.integers(1, 10**5))
def test_a_chunk_is_as_large_as_the_budget_allows(size: Capacity, start: int, budget: int) -> None:
    cost = ContextCost(size)
    num_tokens = cost.chunk(start, budget)
    assert 1 <= num_tokens <= budget
    assert num_tokens <= cost.price(start, num_tokens)
    assert cost.price(start, num_tokens) <= budget or num_tokens == 1
    assert cost.price(start, num_tokens + 1) > budget
    assert cost.chunk(start + 1, budget) <= num_tokens
    assert cost.chunk(0, budget) == budget
