"""The queue of sequences that wait for admission, in policy order.

Owns the order and what has left it; knows nothing of blocks, slots or budgets. Called by the scheduler alone. Adding
and taking cost O(log n) in the number that wait, a cancel O(1) on average: what is over is skipped when it is met, and
swept out once it is most of the queue.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterator

from aserve.scheduler.policy import PolicyKey
from aserve.scheduler.sequence import Sequence

SLACK = 16
"""Entries that may be over before they are swept out, beside as many as are alive."""

_Entry = tuple[PolicyKey, Sequence]


class WaitingQueue:
    """Waiting sequences, of which the first ``front_size`` can be seen in order.

    The front is a sorted list apart from the heap, so that looking at it costs nothing that grows with the queue:
    each of its keys is lower than any in the heap.
    """

    def __init__(self, front_size: int) -> None:
        self._front_size = front_size
        self._front: list[_Entry] = []
        self._heap: list[_Entry] = []
        self._num_alive = 0

    def __len__(self) -> int:
        """Sequences that wait and are not over."""
        return self._num_alive

    def __iter__(self) -> Iterator[Sequence]:
        """Those sequences, in no particular order."""
        return (sequence for entries in (self._front, self._heap) for _, sequence in entries if not sequence.is_over)

    @property
    def num_entries(self) -> int:
        """Sequences held, those that are over included."""
        return len(self._front) + len(self._heap)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence where its key puts it."""
        entry = (sequence.key, sequence)
        self._num_alive += 1
        if not self._front or entry > self._front[-1]:
            heapq.heappush(self._heap, entry)
            return
        insort(self._front, entry)
        if len(self._front) > self._front_size:
            heapq.heappush(self._heap, self._front.pop())

    def front(self) -> list[Sequence]:
        """The first ``front_size`` sequences, or all there are, in order."""
        front, heap = self._front, self._heap
        if any(sequence.is_over for _, sequence in front):
            front[:] = [entry for entry in front if not entry[1].is_over]
        while len(front) < self._front_size and heap:
            entry = heapq.heappop(heap)
            if not entry[1].is_over:
                front.append(entry)
        return [sequence for _, sequence in front]

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence of the front: it runs now."""
        self._front.remove((sequence.key, sequence))
        self._leave()

    def drop(self) -> None:
        """One of the sequences is over: it no longer counts."""
        self._leave()

    def _leave(self) -> None:
        self._num_alive -= 1
        if self.num_entries > 2 * self._num_alive + SLACK:
            self._front = [entry for entry in self._front if not entry[1].is_over]
            self._heap = [entry for entry in self._heap if not entry[1].is_over]
            heapq.heapify(self._heap)


def pick_cached(front: list[Sequence], num_cached: Callable[[Sequence], int], limit: int) -> int:
    """The index in ``front`` of the sequence with the most cached tokens; of several, the first.

    ``front`` is in policy order. Nothing behind a sequence that has been overtaken ``limit`` times is considered, nor
    one whose last token is still in flight.
    """
    last = next((index for index, sequence in enumerate(front) if sequence.num_overtaken >= limit), len(front) - 1)
    if front[0].num_pending or last == 0:
        return 0
    return max(range(last + 1), key=lambda index: (0 if front[index].num_pending else num_cached(front[index]), -index))
