"""Drives a real scheduler over an executor that checks what it reads, and every invariant after every call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from checking_executor import COMPLETING, CheckingExecutor, chain, next_letter

from aserve.core.capacity import Capacity
from aserve.core.grammar import Grammar, GrammarKind
from aserve.core.request import FinishReason, Request, SamplingParams
from aserve.core.step import INVALID_TOKEN, NO_BLOCK, ScheduledSequence, StepPlan, TokenEvent
from aserve.scheduler import Scheduler, check
from aserve.scheduler.invariants import check_plan
from aserve.scheduler.policy import Policy

T = TypeVar("T")


def capacity(
    num_blocks: int = 16,
    block_size: int = 4,
    *,
    max_num_seqs: int = 4,
    max_batch_tokens: int = 16,
    max_in_flight: int = 1,
    max_model_len: int = 10**4,
    windows: tuple[int | None, ...] = (None,),
    num_host_blocks: int = 0,
    parity_context: int | None = None,
) -> Capacity:
    return Capacity(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        max_model_len=max_model_len,
        max_in_flight=max_in_flight,
        windows=windows,
        num_host_blocks=num_host_blocks,
        parity_context=parity_context,
    )


def request(
    name: str,
    prompt: tuple[int, ...] | str,
    max_tokens: int,
    *,
    arrival: int = 0,
    priority: int = 0,
    stop: tuple[int, ...] = (),
    salt: bytes = b"",
    min_tokens: int = 0,
    constrained: bool = False,
) -> Request:
    ids = tuple(prompt.encode()) if isinstance(prompt, str) else prompt
    return Request(
        request_id=name,
        prompt_token_ids=ids,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=stop,
            min_tokens=min_tokens,
            grammar=Grammar(GrammarKind.JSON_OBJECT) if constrained else None,
        ),
        priority=priority,
        arrival_index=arrival,
        cache_salt=salt,
    )


def isolated(req: Request) -> tuple[list[int], FinishReason]:
    """What the request generates when it runs alone on an endless cache."""
    content = 1
    for token in req.prompt_token_ids:
        content = chain(content, token)
    output: list[int] = []
    while True:
        token = next_letter(content)
        content = chain(content, token)
        output.append(token)
        if req.sampling.grammar is not None and token in COMPLETING:
            return output, FinishReason.STOP
        if token in req.sampling.stop_token_ids and (
            req.sampling.grammar is not None or len(output) > req.sampling.min_tokens
        ):
            return output, FinishReason.STOP
        if len(output) == req.sampling.max_tokens:
            return output, FinishReason.LENGTH


@dataclass
class Driver:
    """A scheduler with its executor, and everything that was asked and answered."""

    capacity: Capacity
    policy: Policy = "fcfs"
    aging_steps: int = 256
    prefix_lookahead: int = 0
    prefix_cache: bool = True
    requests: dict[str, Request] = field(default_factory=dict)
    events: dict[str, list[TokenEvent]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    num_resets: int = 0
    calls: list[Callable[[Scheduler], object]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    in_flight: deque[StepPlan] = field(default_factory=deque)
    tables: dict[int, list[list[int]]] = field(default_factory=dict)
    touched: deque[dict[int, str]] = field(default_factory=deque)
    started: set[str] = field(default_factory=set)
    arrival_steps: dict[str, int] = field(default_factory=dict)
    overtaken: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = self._new_scheduler()
        self.executor = CheckingExecutor(self.capacity, self.root_of)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            self.capacity,
            policy=self.policy,
            aging_steps=self.aging_steps,
            prefix_lookahead=self.prefix_lookahead,
            prefix_cache=self.prefix_cache,
        )

    def _call(self, call: Callable[[Scheduler], T]) -> T:
        """Call the scheduler, note the call for ``check_replay``, and look at every invariant."""
        self.calls.append(call)
        result = call(self.scheduler)
        check(self.scheduler)
        return result

    def check_replay(self) -> None:
        """S8: the same calls give the same plans."""
        again = self._new_scheduler()
        plans = [plan for call in self.calls if isinstance(plan := call(again), StepPlan)]
        assert plans == self.plans, "S8: the same calls gave other plans"

    def add(self, req: Request) -> None:
        self.requests[req.request_id] = req
        self.events[req.request_id] = []
        self.arrival_steps[req.request_id] = len(self.plans)
        self._call(lambda scheduler: scheduler.add(req))

    def cancel(self, name: str) -> None:
        self.cancelled.add(name)
        self._call(lambda scheduler: scheduler.cancel(name))
        self._check_in_flight_blocks()

    def root_of(self, name: str) -> tuple[object, ...]:
        """What the KV of a request that starts now depends on, beside its tokens."""
        return self.requests[name].cache_salt, self.num_resets

    def reset(self) -> None:
        """Nothing computed before may be found by those that start from now on."""
        self.num_resets += 1
        self._call(lambda scheduler: scheduler.reset_prefix_cache())

    def fail(self, name: str) -> None:
        """Let the next sampling of a request meet logits that are not finite."""
        self.executor.failing.add(name)

    def plan(self) -> StepPlan | None:
        """Plan and submit one step, if the scheduler has one."""
        idle = not self.in_flight
        plan = self._call(lambda scheduler: scheduler.plan())
        if plan is None:
            assert not (idle and self.live()), "S7: work, nothing in flight, and no plan"
            return None
        check_plan(self.scheduler, plan)
        self._check_order(plan)
        self._check_fences(plan)
        self.plans.append(plan)
        self.in_flight.append(plan)
        self.executor.submit(plan)
        return plan

    def _check_order(self, plan: StepPlan) -> None:
        """S11: one that waits is passed over by those that come later by the policy only for their cached prefix."""
        for row in plan.sequences:
            if row.new is None:
                continue
            self.started.add(row.request_id)
            for name in self.live():
                if name not in self.started and self.key(name) < self.key(row.request_id):
                    self.overtaken[name] = self.overtaken.get(name, 0) + 1
                    assert self.overtaken[name] <= self.prefix_lookahead, f"S11: {row.request_id} overtook {name}"

    def key(self, name: str) -> tuple[int, int]:
        req, step = self.requests[name], self.arrival_steps[name]
        handicap = {
            "fcfs": -step * self.capacity.max_batch_tokens,
            "priority": req.priority * self.aging_steps * self.capacity.max_batch_tokens,
            "shortest-prefill": len(req.prompt_token_ids) * self.aging_steps,
        }
        return (step * self.capacity.max_batch_tokens + handicap[self.policy], req.arrival_index)

    def _check_fences(self, plan: StepPlan) -> None:
        """S2: what a submitted step may read or write is neither free nor written for another sequence."""
        size = self.capacity.block_size
        for copy in plan.restores:
            assert not any(copy.block_id in earlier for earlier in self.touched), f"S2: {copy} into a step in flight"
        touched: dict[int, str] = {}
        for row in plan.sequences:
            for table, window in zip(self._tables_of(row), self.capacity.windows, strict=True):
                end = -(-(row.start + len(row.token_ids)) // size)
                for block in table[row.start // size : end]:
                    for earlier in self.touched:
                        assert earlier.get(block, row.request_id) == row.request_id, f"S2: block {block} written anew"
                first = 0 if window is None else max(0, row.start - window + 1) // size
                touched |= dict.fromkeys(table[first:end], row.request_id)
        assert NO_BLOCK not in touched, "S5: a row reads behind a window"
        self.touched.append(touched)
        self._check_in_flight_blocks()

    def _tables_of(self, row: ScheduledSequence) -> list[list[int]]:
        tables = self.tables.setdefault(row.slot, [[] for _ in self.capacity.windows])
        for table, block_ids in zip(tables, row.new_block_ids or [()] * len(tables), strict=True):
            if row.new is not None:
                table.clear()
            table.extend(block_ids)
        return tables

    def _check_in_flight_blocks(self) -> None:
        for touched in self.touched:
            for block in touched:
                assert not self.scheduler.kv.pool.is_free(block), f"S2: block {block} of a step in flight is free"

    def commit(self) -> tuple[TokenEvent, ...]:
        plan = self.in_flight.popleft()
        self.touched.popleft()
        result = self.executor.wait()
        sampling = [row.request_id for row in plan.sequences if row.samples]
        for name, token in zip(sampling, result.sampled, strict=True):
            if token == INVALID_TOKEN:
                self.failed |= {name} & set(self.live())
                self.executor.taint(name)
        events = self._call(lambda scheduler: scheduler.commit(result))
        self._check_in_flight_blocks()
        for event in events:
            name = event.request_id
            assert name not in self.cancelled, f"S10: an event of {name} after its cancel"
            assert not self.finished(name), f"S10: an event of {name} after its last"
            self.events[name].append(event)
        return events

    def step(self) -> bool:
        """Plan as far as the depth allows, then commit one step; False when there is nothing to do."""
        while self.plan() is not None:
            pass
        if not self.in_flight:
            return False
        self.commit()
        return True

    def finish(self, limit: int = 5000) -> None:
        """Run to the end; every request not cancelled must come out as if it had run alone."""
        for _ in range(limit):
            if not self.step():
                break
        assert not self.scheduler.has_work, "S7: no end in sight"
        for name, req in self.requests.items():
            tokens = [e.token_id for e in self.events[name]]
            expected, reason = isolated(req)
            if name in self.cancelled:
                assert tokens == expected[: len(tokens)], f"S9: {name} before its cancel"
            elif name in self.failed:
                assert self.events[name][-1].finish_reason == FinishReason.ERROR, f"S10: {name} failed and goes on"
                assert tokens == [*expected[: len(tokens) - 1], INVALID_TOKEN], f"S9: {name} before its failure"
            else:
                assert tokens == expected, f"S9: {name} differs from its isolated run"
                assert self.events[name][-1].finish_reason == reason

    def finished(self, name: str) -> bool:
        return bool(self.events[name]) and self.events[name][-1].finish_reason is not None

    def finished_names(self) -> list[str]:
        return [name for name in self.requests if self.finished(name)]

    def live(self) -> list[str]:
        return [n for n in self.requests if n not in self.cancelled and not self.finished(n)]
