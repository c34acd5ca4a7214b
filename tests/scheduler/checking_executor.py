"""An executor that knows what every position of every block must hold, and looks at all that a row may see.

Each position keeps the group and a hash of all tokens up to it, of the tenant and of the weights it was computed with.
A row checks each position that its window reaches before it samples, so content that is stale, shared wrongly, freed
too early, restored from a reused slot or never written is seen in the step that reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from aserve.core.capacity import Capacity
from aserve.core.step import INVALID_TOKEN, NO_BLOCK, PENDING, BlockCopy, ScheduledSequence, StepPlan, StepResult

Root = tuple[object, ...]
"""What a prefix is computed with, apart from its tokens."""

COMPLETING = frozenset(b"uvwxyz")
"""Letters that complete the grammar of a sequence that has one."""

_MASK = (1 << 61) - 1


def chain(previous: int, token: int) -> int:
    """The hash of a prefix, from that of the prefix one token shorter."""
    return ((previous ^ token) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK


def next_letter(content: int) -> int:
    """The model: a lower-case letter's byte, by the hash of all tokens so far."""
    return 97 + (content >> 17) % 26


@dataclass
class Content:
    """What a block, or a slot of host memory, holds.

    Attributes:
        group: for which it was written, -1: never.
        writer: the request that wrote it.
        cells: per position in the block, the hash of the prefix that ends there; 0: nothing.
        tainted: written by a request whose logits were not finite.
    """

    size: int
    group: int = -1
    writer: str = ""
    cells: list[int] = field(default_factory=list)
    tainted: bool = False

    def write(self, place: int, value: int, group: int, writer: str) -> None:
        if not self.cells or place == 0 or group != self.group:
            self.cells = [0] * self.size
            self.tainted = False
        self.group, self.writer = group, writer
        self.cells[place] = value

    def copy_from(self, other: Content) -> None:
        self.group, self.writer, self.tainted = other.group, other.writer, other.tainted
        self.cells = list(other.cells)


@dataclass
class Slot:
    """What the executor keeps for a sequence: its tables, and the hashes that its positions must have."""

    tables: list[list[int]]
    root: int
    hashes: list[int] = field(default_factory=list)
    content: int = 1
    last_sampled: int = PENDING
    constrained: bool = False


class CheckingExecutor:
    """A StepExecutor without a model that fails where it reads anything but what must be there.

    Args:
        root_of: what a request that starts now is computed with, apart from its tokens.
    """

    def __init__(self, capacity: Capacity, root_of: Callable[[str], Root]) -> None:
        self.capacity = capacity
        self.root_of = root_of
        self.failing: set[str] = set()
        self.blocks = [Content(capacity.block_size) for _ in range(capacity.num_blocks)]
        self.host = [Content(capacity.block_size) for _ in range(capacity.num_host_blocks)]
        self.slots: dict[int, Slot] = {}
        self.num_restored_blocks = 0
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        assert len(self._results) < self.capacity.max_in_flight, "too many steps in flight"
        for copy in plan.saves:
            self._save(copy)
        for copy in plan.restores:
            assert self.host[copy.host_slot].cells, f"S12: host slot {copy.host_slot} restored before it was written"
            self.blocks[copy.block_id].copy_from(self.host[copy.host_slot])
            self.num_restored_blocks += 1
        sampled: list[int] = []
        completed: set[int] = set()
        for row in plan.sequences:
            token = self._run(row)
            if token is None:
                continue
            if self.slots[row.slot].constrained and token in COMPLETING:
                completed.add(len(sampled))
            sampled.append(token)
        self._results.append(StepResult(plan.step_id, tuple(sampled), completed=frozenset(completed)))

    def wait(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        """Nothing is held."""

    def taint(self, writer: str) -> None:
        """What a failed request wrote must not be read by anyone who starts from now on."""
        for content in self.blocks + self.host:
            content.tainted |= content.writer == writer

    def _save(self, copy: BlockCopy) -> None:
        block = self.blocks[copy.block_id]
        assert block.cells, f"S12: block {copy.block_id} saved before it was written"
        assert all(block.cells), f"S12: block {copy.block_id} saved before it was full"
        self.host[copy.host_slot].copy_from(block)

    def _run(self, row: ScheduledSequence) -> int | None:
        if row.new is not None:
            self._begin(row)
        slot = self.slots[row.slot]
        assert not (slot.constrained and PENDING in row.token_ids), f"{row.request_id}: a mask without its last token"
        for table, block_ids in zip(slot.tables, row.new_block_ids, strict=False):
            table.extend(block_ids)
        assert len(slot.hashes) == row.start, f"S9: {row.request_id} starts at {row.start}, not {len(slot.hashes)}"
        if row.new is not None:
            self._read(row, slot, row.start)
        size = self.capacity.block_size
        for place, token in enumerate(row.token_ids, row.start):
            value = slot.last_sampled if token == PENDING else token
            slot.content = chain(slot.content, value)
            slot.hashes.append(chain(slot.hashes[-1] if slot.hashes else slot.root, value))
            for group, table in enumerate(slot.tables):
                block_id = table[place // size]
                assert block_id != NO_BLOCK, f"S5: {row.request_id} writes {place} of group {group} nowhere"
                self.blocks[block_id].write(place % size, slot.hashes[-1], group, row.request_id)
        self._read(row, slot, row.start + len(row.token_ids))
        if not row.samples:
            return None
        slot.last_sampled = next_letter(slot.content)
        if row.request_id in self.failing:
            self.failing.discard(row.request_id)
            return INVALID_TOKEN
        return slot.last_sampled

    def _begin(self, row: ScheduledSequence) -> None:
        assert row.new is not None
        root = hash(self.root_of(row.request_id)) & _MASK
        constrained = row.new.sampling.grammar is not None
        slot = self.slots[row.slot] = Slot([[] for _ in self.capacity.windows], root, constrained=constrained)
        previous = root
        for token in row.new.prior_token_ids:
            slot.content = chain(slot.content, token)
            previous = chain(previous, token)
            slot.hashes.append(previous)

    def _read(self, row: ScheduledSequence, slot: Slot, end: int) -> None:
        """Look at every position before ``end`` that the row's first query, or a later one, sees."""
        size = self.capacity.block_size
        for group, (window, table) in enumerate(zip(self.capacity.windows, slot.tables, strict=True)):
            first = 0 if window is None else max(0, row.start - window + 1)
            for index in range(first // size, -(-end // size)):
                begin = max(first, index * size)
                expected = slot.hashes[begin : min(end, (index + 1) * size)]
                block = self.blocks[table[index]] if table[index] != NO_BLOCK else Content(size)
                place = begin - index * size
                what = f"{row.request_id} at {row.start}, group {group}, block {index}"
                assert block.cells[place : place + len(expected)] == expected, f"S9: wrong content for {what}"
                assert block.group == group, f"S9: content of group {block.group} for {what}"
                assert row.new is None or not block.tainted, f"S9: content of a failed request for {what}"
