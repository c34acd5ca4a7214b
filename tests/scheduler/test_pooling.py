"""Prompts that become vectors: beside answers, in chunks, after preemption, over cached prefixes, whole in encoders."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from driver import capacity, request
from hypothesis import given

from aserve.core.capacity import Capacity
from aserve.core.pooling import PoolingKind, PoolingParams
from aserve.core.request import FinishReason, Request
from aserve.core.step import POOLED, TokenEvent
from aserve.scheduler import Scheduler, check, check_idle
from aserve.scheduler.invariants import check_plan
from aserve.testing import FakeExecutor, fake_vector

PROMPT = "abcdefgh" * 6
MEAN, LAST, FIRST = (PoolingParams(kind=kind) for kind in (PoolingKind.MEAN, PoolingKind.LAST, PoolingKind.FIRST))


def pooled(name: str, prompt: str, params: PoolingParams = MEAN, arrival: int = 0) -> Request:
    return replace(request(name, prompt, 1, arrival=arrival), pooling=params)


class Run:
    """A scheduler over a fake executor, driven as the step loop drives it."""

    def __init__(self, size: Capacity, **options: bool) -> None:
        self.scheduler = Scheduler(size, **options)
        self.executor = FakeExecutor(size)
        self.starts: list[tuple[str, int, int]] = []
        self.events: dict[str, list[TokenEvent]] = {}
        self._num_unread = 0

    def add(self, *requests: Request) -> Run:
        for req in requests:
            self.events[req.request_id] = []
            self.scheduler.add(req)
        return self

    def step(self) -> None:
        plan = self.scheduler.plan()
        check(self.scheduler)
        if plan is not None:
            check_plan(self.scheduler, plan)
            self.starts += [(row.request_id, row.start, len(row.token_ids)) for row in plan.sequences]
            self.executor.submit(plan)
            self._num_unread += 1
            if self._num_unread < self.scheduler.capacity.max_in_flight:
                return
        assert self._num_unread, "S7: work, nothing in flight, and no plan"
        self._num_unread -= 1
        for event in self.scheduler.commit(self.executor.wait()):
            self.events[event.request_id].append(event)
        check(self.scheduler)

    def finish(self) -> Run:
        while self.scheduler.has_work:
            self.step()
        check_idle(self.scheduler)
        return self


def check_vector(run: Run, req: Request) -> None:
    """One event, with the vector that the prompt has by itself."""
    (event,) = run.events[req.request_id]
    assert (event.token_id, event.finish_reason) == (POOLED, FinishReason.STOP)
    assert req.pooling is not None
    assert event.vector is not None
    expected = fake_vector(list(req.prompt_token_ids), req.pooling)
    np.testing.assert_allclose(np.frombuffer(event.vector, "<f4"), expected, rtol=1e-6)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17])
def test_it_is_over_when_its_prompt_is_computed(length: int, depth: int) -> None:
    """Also when the last chunk is a single token, which looks like a decode."""
    req = pooled("a", PROMPT[:length])
    run = Run(capacity(max_batch_tokens=8, max_in_flight=depth)).add(req).finish()
    assert sum(num_tokens for _, _, num_tokens in run.starts) == length
    check_vector(run, req)


def test_a_prompt_may_be_as_long_as_the_capacity() -> None:
    size = capacity(4, 4, max_batch_tokens=8)
    req = pooled("a", PROMPT[: size.max_length])
    check_vector(Run(size).add(req).finish(), req)


def test_a_mean_is_computed_over_a_cached_prefix_and_a_last_token_is_not() -> None:
    run = Run(capacity(max_batch_tokens=64))
    run.add(pooled("first", PROMPT[:30])).finish()
    last, mean = pooled("last", PROMPT[:30], LAST, 1), pooled("mean", PROMPT[:30], MEAN, 2)
    run.add(last, mean).finish()
    assert ("last", 28, 2) in run.starts
    assert ("mean", 0, 30) in run.starts
    check_vector(run, last)
    check_vector(run, mean)


def test_what_it_computed_is_a_prefix_for_others() -> None:
    run = Run(capacity(max_batch_tokens=64))
    run.add(pooled("a", PROMPT[:16])).finish()
    run.add(request("b", PROMPT[:20], 2)).finish()
    assert ("b", 16, 4) in run.starts


def test_cancelled_in_mid_prompt_it_leaves_nothing_behind() -> None:
    run = Run(capacity(max_batch_tokens=8, max_in_flight=2)).add(pooled("a", PROMPT[:40]))
    run.step()
    run.step()
    run.scheduler.cancel("a")
    run.finish()
    assert run.events["a"] == []


pooled_requests = st.tuples(
    st.sampled_from([PROMPT, "xyz" * 16, "a" * 48]), st.integers(1, 40), st.sampled_from([MEAN, LAST, FIRST, None])
)


@given(
    st.lists(st.tuples(pooled_requests, st.integers(0, 6)), min_size=1, max_size=12),
    st.integers(0, 12),
    st.integers(1, 24),
    st.integers(1, 2),
    st.booleans(),
)
def test_vectors_do_not_depend_on_the_company(wanted, num_extra, max_batch_tokens, depth, prefix_cache) -> None:
    """Nor on chunks, preemption (the cache holds little more than one request) and prefixes."""
    size = capacity(11 + num_extra, 4, max_batch_tokens=max_batch_tokens, max_in_flight=depth)
    run = Run(size, prefix_cache=prefix_cache)
    requests: list[Request] = []
    for number, ((prompt, length, params), num_steps) in enumerate(wanted):
        req = request(f"r{number}", prompt[:length], 4, arrival=number)
        requests.append(req if params is None else replace(req, pooling=params))
        run.add(requests[-1])
        for _ in range(num_steps):
            if run.scheduler.has_work:
                run.step()
    run.finish()
    for req in requests:
        if req.pooling is None:
            assert len(run.events[req.request_id]) == 4
        else:
            check_vector(run, req)


def encoder(max_batch_tokens: int = 16, depth: int = 1) -> Capacity:
    return replace(capacity(64, 4, max_batch_tokens=max_batch_tokens, max_in_flight=depth), whole_prompts=True)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=20), st.integers(1, 2))
def test_encoders_get_every_prompt_whole_and_in_order(lengths: list[int], depth: int) -> None:
    """Equal beginnings are computed again: an encoder leaves nothing that could be used twice."""
    requests = [pooled(f"r{n}", PROMPT[:length], arrival=n) for n, length in enumerate(lengths)]
    run = Run(encoder(depth=depth)).add(*requests).finish()
    assert run.starts == [(f"r{n}", 0, length) for n, length in enumerate(lengths)]
    for req in requests:
        check_vector(run, req)


def test_an_encoder_takes_no_prompt_that_is_longer_than_a_step() -> None:
    assert encoder(16).max_length == 16
    assert encoder(1000).max_length == 64 * 4
    assert replace(encoder(1000), max_model_len=12).max_length == 12
