"""What must hold between any two calls of the scheduler; each statement has the id used in the documentation.

``check`` is called by tests after every call; it costs O(blocks), which on a GPU can be half a second. ``check_idle``
is cheap and called by the step loop whenever it goes idle. Both read private state on purpose: they are the
scheduler's own conscience, and they raise AssertionError naming the broken invariant.
"""

from __future__ import annotations

from collections import Counter

from aserve.core.step import NO_BLOCK, StepPlan
from aserve.scheduler.prefix_key import hash_at
from aserve.scheduler.scheduler import Scheduler
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.waiting import SLACK

# pyright: reportPrivateUsage=false


def _require(condition: bool, invariant: str, what: object) -> None:
    if not condition:
        raise AssertionError(f"{invariant}: {what}")


def check(scheduler: Scheduler) -> None:
    """Check S1 to S5, S12 and, when nothing is live, S10. Costs O(blocks + sequences)."""
    _check_blocks(scheduler)
    _check_host(scheduler)
    _check_states(scheduler)
    for sequence in scheduler._live.values():
        _check_progress(scheduler, sequence)
    if not scheduler.has_work:
        check_idle(scheduler)


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check S6 on a plan that was just made."""
    capacity = scheduler.capacity
    slots = [row.slot for row in plan.sequences]
    _require(0 < plan.num_tokens <= capacity.max_batch_tokens, "S6", f"{plan.num_tokens} tokens in a plan")
    _require(len(plan.sequences) <= capacity.max_num_seqs, "S6", "too many rows")
    _require(all(row.token_ids for row in plan.sequences), "S6", "an empty row")
    _require(len(set(slots)) == len(slots), "S6", f"a slot twice in {slots}")
    written = [copy.host_slot for copy in plan.saves]
    _require(len(set(written)) == len(written), "S12", f"a host slot written twice in {plan.saves}")
    filled = [copy.block_id for copy in plan.restores]
    _require(len(set(filled)) == len(filled), "S12", f"a block restored twice in {plan.restores}")
    host_slots = range(capacity.num_host_blocks)
    _require(all(c.host_slot in host_slots for c in plan.saves + plan.restores), "S12", "a host slot there is not")


def _holders(scheduler: Scheduler) -> Counter[int]:
    holders: Counter[int] = Counter()
    for sequence in scheduler._running:
        for table in sequence.block_tables:
            holders.update(table)
    for step in scheduler._in_flight:
        for block_ids in step.fenced_blocks:
            holders.update(block_ids)
    del holders[NO_BLOCK]
    return holders


def _check_blocks(scheduler: Scheduler) -> None:
    pool = scheduler.kv.pool
    holders = _holders(scheduler)
    num_indexed = 0
    # these take blocks that stay shared out of the index
    unpublishes = scheduler.kv.epoch > 0 or scheduler.kv.num_withdrawn_shared > 0
    for block_id in range(pool.num_blocks):
        # written out: tests call this millions of times, and a text for each block that is well costs most of the time
        count = pool.ref_count(block_id)
        held = holders.get(block_id, 0)
        if count != held:
            _require(False, "S1", f"block {block_id} has {count} counted, {held} holders")
        if pool.is_free(block_id) != (count == 0):
            _require(False, "S1", f"block {block_id} with {count} holders: free or not?")
        key = pool.key(block_id)
        if key is not None:
            num_indexed += 1
            if pool.lookup(key) != block_id:
                _require(False, "S1", f"block {block_id} has another block's key")
        elif count > 1 and not unpublishes:
            _require(False, "S3", f"block {block_id} is shared and not published")
    _require(pool.num_indexed == num_indexed, "S1", "the index has entries that no block has")
    _require(pool.num_free + len(+holders) == pool.num_blocks, "S1", "free and held blocks do not add up")
    for sequence in scheduler._running:
        for group, table in enumerate(sequence.block_tables):
            _check_table(scheduler, sequence, group, table)


def _check_table(scheduler: Scheduler, sequence: Sequence, group: int, table: list[int]) -> None:
    """A block is shared or published only once it is full, and by the name of what the holder has there."""
    pool, size = scheduler.kv.pool, scheduler.capacity.block_size
    for index, block_id in enumerate(table):
        if block_id == NO_BLOCK:
            continue
        full = (index + 1) * size <= sequence.num_computed
        key = pool.key(block_id)
        private = pool.ref_count(block_id) == 1 and key is None
        _require(full or private, "S3", f"block {block_id} is published or shared before it is computed")
        if key is not None:
            _require(key == hash_at(sequence, index, size) + bytes([group]), "S3", f"block {block_id} is misnamed")


def _check_host(scheduler: Scheduler) -> None:
    host = scheduler.kv.host
    slots = list(host._slots.values()) + host._free
    _require(sorted(slots) == list(range(host.num_slots)), "S12", "free and used host slots do not make up all")
    _require(set(host._saves) <= set(host._slots.values()), "S12", "a save into a host slot that nothing is kept in")
    _require(not host._restores and not host._pinned, "S12", "a restore that no plan has")


def _check_states(scheduler: Scheduler) -> None:
    waiting = {s.request.request_id for s in scheduler._waiting}
    running = [s.request.request_id for s in scheduler._running]
    _require(len(set(running)) == len(running), "S4", "a sequence runs twice")
    _require(not waiting & set(running), "S4", "a sequence waits and runs")
    _require(waiting | set(running) == set(scheduler._live), "S4", "a live sequence neither waits nor runs")
    _require(len(scheduler._waiting) == len(waiting), "S4", "the number of waiting sequences is wrong")
    slots = [s.slot for s in scheduler._running]
    slots += [slot for step in scheduler._in_flight for slot in step.fenced_slots]
    _require(
        sorted(slots + scheduler._free_slots) == list(range(scheduler.capacity.max_num_seqs)),
        "S4",
        f"slots {slots} and free {scheduler._free_slots} do not make up all",
    )
    num_entries = scheduler._waiting.num_entries
    _require(num_entries <= 2 * len(waiting) + SLACK, "S4", "ended sequences pile up in the queue")
    owners = {s.slot: s for s in scheduler._running}
    for step in scheduler._in_flight:
        for sequence, slot, *_ in step.rows:
            _require(slot not in scheduler._free_slots, "S2", f"slot {slot} of a step in flight is free")
            owner = owners.get(slot, sequence)
            _require(owner is sequence, "S2", f"slot {slot} of a step in flight has another owner")
    keys = [s.key for s in scheduler._running]
    _require(keys == sorted(keys), "S11", "running sequences are out of order")


def _check_progress(scheduler: Scheduler, sequence: Sequence) -> None:
    name = sequence.request.request_id
    _require(0 <= sequence.num_computed <= sequence.num_scheduled <= sequence.num_known, "S5", f"counters of {name}")
    capacity = scheduler.capacity
    _require(sequence.num_scheduled <= sequence.num_covered or sequence.slot < 0, "S5", f"{name} lacks blocks")
    for group, table in enumerate(sequence.block_tables):
        _require(
            len(table) * capacity.block_size == sequence.num_covered, "S5", f"a table of {name} is too long or short"
        )
        first = capacity.first_block(capacity.windows[group], sequence.num_computed)
        gone = [index for index, block_id in enumerate(table) if block_id == NO_BLOCK]
        _require(gone == list(range(first)), "S5", f"{name} lacks blocks {gone} of group {group}, {first} are not read")
        _require(sequence.first_blocks[group] == first, "S5", f"{name} miscounts what fell behind a window")
    _require(sequence.num_known <= sequence.max_length, "S5", f"{name} grows beyond its limit")
    _require(sequence.slot >= 0 or not sequence.block_tables, "S4", f"{name} waits and holds blocks")
    for step in scheduler._in_flight:
        for other, _, epoch, _, _ in step.rows:
            if other is sequence and epoch == sequence.epoch:
                _require(sequence.slot >= 0, "S2", f"{name} is in flight without a slot")


def check_idle(scheduler: Scheduler) -> None:
    """Check S10 when nothing is live: every block and slot is back. Costs O(1)."""
    pool = scheduler.kv.pool
    _require(pool.num_free == pool.num_blocks, "S10", f"idle with {pool.num_blocks - pool.num_free} blocks in use")
    _require(scheduler._num_fenced_blocks == 0, "S10", "idle with fenced blocks")
    _require(not scheduler._running and not scheduler._waiting, "S10", "idle with sequences")
    num_slots = scheduler.capacity.max_num_seqs
    _require(len(scheduler._free_slots) == num_slots, "S10", f"idle with {num_slots} slots, not all free")
