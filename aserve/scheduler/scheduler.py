"""The scheduler: a state machine with four verbs, add, cancel, plan and commit.

Pure and synchronous; called by the step loop alone. The same calls in the same order give the same plans. There is no
prefill or decode phase: each step brings every sequence's computed tokens closer to its known tokens (the idea is
vLLM's), decodes first, then prefill chunks, then admissions, so a long prompt never holds up a running stream.

Frees are fenced: blocks and slots that a submitted step may still touch come back when that step is committed.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque

from aserve.core.capacity import Capacity
from aserve.core.request import FinishReason, Request, RequestId
from aserve.core.step import (
    INVALID_TOKEN,
    PENDING,
    POOLED,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TokenEvent,
)
from aserve.scheduler.announcement import announce
from aserve.scheduler.context_cost import ContextCost
from aserve.scheduler.draft import Draft
from aserve.scheduler.in_flight import InFlightStep, PlannedRow
from aserve.scheduler.kv_cache_manager import KVCacheManager
from aserve.scheduler.policy import Policy, PolicyKey, key_function
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.stats import SchedulerStats
from aserve.scheduler.waiting import WaitingQueue, pick_cached

_ONE_PENDING = (PENDING,)


def _key(sequence: Sequence) -> PolicyKey:
    return sequence.key


class Scheduler:
    """Decides what runs, over the block ids and slots of one executor.

    Args:
        policy: the order of admission, see ``policy``.
        aging_steps: how many steps of waiting make up for a disadvantage under the policy.
        prefix_lookahead: how many later requests may each time be passed over for one with a cached prefix; 0: none.
        prefix_cache: whether equal beginnings of prompts are computed once.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        policy: Policy = "fcfs",
        aging_steps: int = 256,
        prefix_lookahead: int = 0,
        prefix_cache: bool = True,
    ) -> None:
        self.capacity = capacity
        self.kv = KVCacheManager(capacity, prefix_cache=prefix_cache and not capacity.whole_prompts)
        self._key_of = key_function(policy, aging_steps=aging_steps, max_batch_tokens=capacity.max_batch_tokens)
        self._context_cost = ContextCost(capacity)
        self._prefix_lookahead = prefix_lookahead
        self._live: dict[RequestId, Sequence] = {}
        self._waiting = WaitingQueue(1 + prefix_lookahead)
        self._running: list[Sequence] = []  # in policy order
        self._free_slots = list(range(capacity.max_num_seqs))  # a heap, so that low slots are reused first
        self._in_flight: deque[InFlightStep] = deque()
        self._num_fenced_blocks = 0
        self._next_step_id = 0
        self._num_preemptions = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0

    @property
    def has_work(self) -> bool:
        """Whether a live request or an uncommitted step exists."""
        return bool(self._live or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self._in_flight)

    def stats(self) -> SchedulerStats:
        pool = self.kv.pool
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_used_blocks=pool.num_blocks - pool.num_free,
            num_blocks=pool.num_blocks,
            num_preemptions=self._num_preemptions,
            num_prefix_queries=self._num_prefix_queries,
            num_prefix_hits=self._num_prefix_hits,
            num_host_hits=self.kv.num_host_hits,
            num_restored_tokens=self.kv.num_restored_tokens,
        )

    # -- the verbs ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits the capacity and that its id is not in use."""
        assert request.prompt_token_ids, "a request has at least one prompt token"
        assert request.max_length <= self.capacity.max_length, f"{request.request_id} can never fit"
        assert request.request_id not in self._live, f"{request.request_id} is live already"
        sequence = Sequence(request, self._key_of(request, self._next_step_id))
        self._live[request.request_id] = sequence
        self._waiting.add(sequence)

    def cancel(self, request_id: RequestId) -> None:
        """End a request in whatever state it is; idempotent. No event of it follows."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            sequence.cancelled = True
            self._retire(sequence)

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes, as a change of the weights demands: what is computed so far is matched by nobody new."""
        self.kv.reset()

    def plan(self) -> StepPlan | None:
        """Decide the next step; None when nothing can run now or ``max_in_flight`` steps await their commit."""
        if len(self._in_flight) >= self.capacity.max_in_flight:
            return None
        draft = Draft(self.capacity.max_batch_tokens, [step.filled for step in self._in_flight])
        self._schedule_decodes(draft)
        self._schedule_prefills(draft)
        if self._waiting and not self._free_slots:
            self._hash_ahead(self._waiting.front(), draft)  # whoever gets the next slot then starts at once
        return self._submit(draft) if draft.rows else None

    def commit(self, result: StepResult) -> tuple[TokenEvent, ...]:
        """Take the result of the oldest uncommitted step; returns its tokens and lifts its fences."""
        step = self._in_flight.popleft()
        assert result.step_id == step.step_id, f"result of step {result.step_id}, expected {step.step_id}"
        events: list[TokenEvent] = []
        sampled, block_size = result.sampled, self.capacity.block_size
        index = -1
        for sequence, _, epoch, num_tokens, samples in step.rows:
            index += samples
            broken = samples and sampled[index] == INVALID_TOKEN
            if broken:  # also if it has been cancelled or preempted: what it published is still there
                self.kv.withdraw(sequence)
            if sequence.cancelled or sequence.finish_reason is not None:
                continue
            if sequence.epoch == epoch:
                sequence.num_computed += num_tokens
                sequence.num_in_flight -= num_tokens
                # one token in sixteen fills a block; the call costs as much as the rest of the round
                full = sequence.num_computed >= (sequence.num_published_blocks + 1) * block_size
                if not broken and (full or sequence.num_computed >= sequence.next_drop):
                    self.kv.publish(sequence)
            if samples:
                events.append(self._take_token(sequence, result, index))
        self._lift_fences(step)
        return tuple(events)

    # -- planning ----------------------------------------------------------------------------------------------------

    def _schedule_decodes(self, draft: Draft) -> None:
        """Grant one token to every running sequence that needs just one."""
        running, rows = self._running, draft.rows
        position = 0
        while position < len(running) and draft.budget > 0:  # preemption shortens the list behind the position
            sequence = running[position]
            position += 1
            # written out: this runs per sequence and step, and nested properties cost 0.3 us more each
            num_known = len(sequence.token_ids) + sequence.num_pending
            num_scheduled = sequence.num_computed + sequence.num_in_flight
            if num_known == num_scheduled + 1 and num_known < sequence.max_length:
                if sequence.keeps_to_grammar and sequence.num_pending:
                    continue  # what may follow depends on that token; the others go on
                if num_scheduled < sequence.num_covered:
                    rows[sequence] = 1
                    draft.budget -= 1
                else:
                    self._grant(sequence, 1, draft)
            elif num_known > num_scheduled + 1:
                draft.prefills.append(sequence)

    def _schedule_prefills(self, draft: Draft) -> None:
        """Spread what is left of the budget over prompts in policy order: those that run, and those that wait."""
        draft.has_streams = bool(draft.rows)
        for sequence in draft.prefills:
            draft.num_promised_blocks += self.kv.num_promised_blocks(sequence, sequence.num_known)
        for sequence in draft.prefills:
            self._admit(draft, before=sequence.key)
            if draft.budget > 0 and sequence.slot >= 0:
                promised = self.kv.num_promised_blocks(sequence, sequence.num_known)
                self._grant(sequence, self._chunk(sequence, draft), draft)
                draft.num_promised_blocks += self.kv.num_promised_blocks(sequence, sequence.num_known) - promised
        self._admit(draft)

    def _grant(self, sequence: Sequence, num_tokens: int, draft: Draft) -> None:
        start = sequence.num_scheduled
        if start + num_tokens > sequence.num_covered:
            num_tokens = self.kv.chunk_that_fits(sequence, num_tokens, len(self._running) * self.capacity.num_groups)
            if not self._make_room(sequence, self.kv.num_missing_blocks(sequence, start + num_tokens), draft):
                return
            self.kv.grow(sequence, start + num_tokens)
        self._grant_tokens(sequence, num_tokens, draft)

    def _chunk(self, sequence: Sequence, draft: Draft) -> int:
        """How many of a prompt's tokens the rest of the budget pays for."""
        budget = draft.budget
        if draft.has_streams:
            budget = self._context_cost.chunk(sequence.num_scheduled, budget)
        return min(sequence.num_to_compute, budget)

    def _grant_tokens(self, sequence: Sequence, num_tokens: int, draft: Draft) -> None:
        """Grant a chunk, or a decode, for which there are blocks."""
        draft.grant(sequence, num_tokens)
        if draft.has_streams:
            draft.budget -= self._context_cost.price(sequence.num_scheduled, num_tokens) - num_tokens
        if num_tokens > 1:
            draft.filled.update(self.kv.hashes_filled_by(sequence, num_tokens))

    def _make_room(self, sequence: Sequence, num_blocks: int, draft: Draft) -> bool:
        """Free blocks for a running sequence at the cost of those behind it; False if it has to wait."""
        pool = self.kv.pool
        while pool.num_free < num_blocks:
            if pool.num_free + self._num_fenced_blocks >= num_blocks:
                return False  # a commit brings enough
            victim = self._running[-1]
            if victim is sequence:
                return False  # those ahead of it hold the rest, and will finish
            self._preempt(victim, draft)
        return True

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        """Send a running sequence back to the queue; its KV is computed again later."""
        draft.revoke(victim)
        draft.preempted = True
        self._num_preemptions += 1
        self._running.remove(victim)
        self._release(victim)
        victim.forget_kv()
        self._waiting.add(victim)

    def _admit(self, draft: Draft, *, before: PolicyKey | None = None) -> None:
        """Start waiting sequences in policy order, as far as ``before``, until one does not fit now."""
        while self._waiting and draft.budget > 0 and self._free_slots and not draft.preempted:
            front = [sequence for sequence in self._waiting.front() if before is None or sequence.key < before]
            if not front:
                return
            self._hash_ahead(front, draft)
            index = pick_cached(front, self.kv.prefixes.num_cached, self._prefix_lookahead) if len(front) > 1 else 0
            if not self._try_to_start(front[index], draft):
                # being passed over is counted when it happens, so one that has no room must not hold up the first
                if index == 0 or not self._try_to_start(front[0], draft):
                    return
                index = 0
            self._waiting.remove(front[index])
            for overtaken in front[:index]:
                overtaken.num_overtaken += 1

    def _hash_ahead(self, front: list[Sequence], draft: Draft) -> None:
        if self.kv.prefix_cache:
            for sequence in front:
                draft.hash_budget = self.kv.prefixes.hash_ahead(sequence, draft.hash_budget)

    def _try_to_start(self, sequence: Sequence, draft: Draft) -> bool:
        if sequence.num_pending:
            return False  # preempted, and its last token is still in flight; that value is needed to go on
        if self._running and self.kv.prefix_cache and not self.kv.prefixes.is_hashed(sequence):
            return False  # hashes are made in pieces; a batch that runs does not stand still for them
        return self._start(sequence, draft)

    def _start(self, sequence: Sequence, draft: Draft) -> bool:
        """Give a waiting sequence a slot and its first chunk, if its whole prompt has room."""
        # A place more per running sequence stays free: without it an admission to the brim is preempted at once.
        reserve = draft.num_promised_blocks + len(self._running) * self.capacity.num_groups
        room = self.kv.pool.num_free - reserve
        if self.capacity.whole_prompts and len(sequence.token_ids) > draft.budget:
            return False  # a step with all of its budget takes any
        if any(sequence.awaited_hash in hashes for hashes in draft.forthcoming):
            return False
        if self._running and not self.kv.prefixes.may_fit(sequence, room):
            return False
        matched = self.kv.match_prefix(sequence)
        if self.kv.prefixes.is_worth_waiting(sequence, matched.num_blocks, draft.forthcoming):
            return False
        needed = self.kv.num_blocks_to_take(matched, len(sequence.token_ids))
        if needed > room:
            self.kv.prefixes.refuse(sequence, matched, needed)
            return False
        self.kv.start(sequence, matched)
        self._note_prefix(sequence)
        sequence.slot = heapq.heappop(self._free_slots)
        insort(self._running, sequence, key=_key)
        num_tokens = self.kv.chunk_that_fits(sequence, self._chunk(sequence, draft), reserve)
        self.kv.grow(sequence, sequence.num_scheduled + num_tokens)
        self._grant_tokens(sequence, num_tokens, draft)
        draft.num_promised_blocks += self.kv.num_promised_blocks(sequence, len(sequence.token_ids))
        return True

    def _note_prefix(self, sequence: Sequence) -> None:
        if sequence.num_cached_tokens < 0:  # only the first time: later hits are its own blocks
            sequence.num_cached_tokens = sequence.num_computed
            self._num_prefix_queries += len(sequence.request.prompt_token_ids)
            self._num_prefix_hits += sequence.num_computed

    def _submit(self, draft: Draft) -> StepPlan:
        step_id = self._next_step_id
        self._next_step_id += 1
        planned: list[PlannedRow] = []
        rows: list[ScheduledSequence] = []
        for sequence, num_tokens in draft.rows.items():
            num_in_flight, num_pending, slot = sequence.num_in_flight, sequence.num_pending, sequence.slot
            tokens = sequence.token_ids
            start = sequence.num_computed + num_in_flight
            end = start + num_tokens
            if end <= len(tokens):
                token_ids = tuple(tokens[start:end])
            else:  # only a sequence whose other tokens are all scheduled samples, so the pending one comes alone
                assert num_tokens == 1
                token_ids = _ONE_PENDING
            samples = end == len(tokens) + num_pending
            new, blocks = None, ()
            if sequence.num_covered > sequence.num_announced:
                new, blocks = announce(sequence, start, self.capacity.block_size)
            request_id = sequence.request.request_id
            rows.append(ScheduledSequence(request_id, slot, start, token_ids, blocks, samples, new))
            planned.append((sequence, slot, sequence.epoch, num_tokens, samples))
            sequence.num_in_flight = num_in_flight + num_tokens
            sequence.num_pending = num_pending + samples
            sequence.last_step_id = step_id
        self._in_flight.append(InFlightStep(step_id, planned, draft.filled))
        return StepPlan(step_id, tuple(rows), *self.kv.take_copies())

    # -- committing --------------------------------------------------------------------------------------------------

    def _take_token(self, sequence: Sequence, result: StepResult, index: int) -> TokenEvent:
        token_id = result.sampled[index]
        sequence.num_pending -= 1
        vector = None
        completes = index in result.completed if result.completed else False
        if token_id >= 0:
            sequence.token_ids.append(token_id)
            finish_reason = FinishReason.STOP if completes else sequence.finish_reason_after(token_id)
        elif token_id == POOLED:
            finish_reason, vector = FinishReason.STOP, result.vectors[index]
        else:
            finish_reason = FinishReason.ERROR
        if finish_reason is not None:
            sequence.finish_reason = finish_reason
            self._retire(sequence)
        logprobs = result.logprobs.get(index) if result.logprobs else None
        return TokenEvent(
            sequence.request.request_id,
            token_id,
            logprobs,
            finish_reason,
            sequence.num_cached_tokens,
            vector,
            completes,
        )

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _retire(self, sequence: Sequence) -> None:
        """Take a sequence that is over out of wherever it is."""
        del self._live[sequence.request.request_id]
        if sequence.slot >= 0:
            self._running.remove(sequence)
            self._release(sequence)
            sequence.forget_kv()
        else:
            self._waiting.drop()

    def _release(self, sequence: Sequence) -> None:
        """Give up blocks and slot, at once or, while a submitted step may touch them, at its commit."""
        if self._in_flight and sequence.last_step_id >= self._in_flight[0].step_id:
            step = self._in_flight[sequence.last_step_id - self._in_flight[0].step_id]
            held = self.kv.held_blocks(sequence)
            step.fenced_blocks.append(held)
            step.fenced_slots.append(sequence.slot)
            pool = self.kv.pool
            only_holder = sum(pool.ref_count(block_id) == 1 for block_id in held)
            step.num_blocks_to_free += only_holder
            self._num_fenced_blocks += only_holder
        else:
            self.kv.release(self.kv.held_blocks(sequence))
            heapq.heappush(self._free_slots, sequence.slot)

    def _lift_fences(self, step: InFlightStep) -> None:
        for block_ids in step.fenced_blocks:
            self.kv.release(block_ids)
        for slot in step.fenced_slots:
            heapq.heappush(self._free_slots, slot)
        self._num_fenced_blocks -= step.num_blocks_to_free
