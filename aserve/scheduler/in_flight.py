"""A submitted step until its commit: what it computes, and what it keeps from being reused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from aserve.scheduler.sequence import Sequence


class PlannedRow(NamedTuple):
    """A row as submitted. Its tokens count as computed only if the sequence still has this epoch at the commit."""

    sequence: Sequence
    slot: int
    epoch: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class InFlightStep:
    """Attributes:
    fenced_blocks: block tables given up while this step may touch them; released at its commit.
    fenced_slots: slots, likewise.
    num_blocks_to_free: how many of those blocks had no other holder when they were fenced.
    """

    step_id: int
    rows: list[PlannedRow]
    fenced_blocks: list[list[int]] = field(default_factory=list[list[int]])
    fenced_slots: list[int] = field(default_factory=list[int])
    num_blocks_to_free: int = 0
