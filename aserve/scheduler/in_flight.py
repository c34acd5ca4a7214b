"""A submitted step until its commit: what it computes, and what it keeps from being reused."""

from __future__ import annotations

from dataclasses import dataclass, field

from aserve.scheduler.sequence import Sequence

PlannedRow = tuple[Sequence, int, int, int, bool]
"""A row as submitted: (sequence, slot, epoch, num_tokens, samples). Its tokens count as computed only if the sequence
still has this epoch at the commit. A plain tuple: a named one takes a sixth of the scheduler's time to make."""


@dataclass(slots=True)
class InFlightStep:
    """Attributes:
    filled: prefix hashes of the blocks that its chunks of prompts make full.
    fenced_blocks: block tables given up while this step may touch them; released at its commit.
    fenced_slots: slots, likewise.
    num_blocks_to_free: how many of those blocks had no other holder when they were fenced.
    """

    step_id: int
    rows: list[PlannedRow]
    filled: set[bytes]
    fenced_blocks: list[list[int]] = field(default_factory=list[list[int]])
    fenced_slots: list[int] = field(default_factory=list[int])
    num_blocks_to_free: int = 0
