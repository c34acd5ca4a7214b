"""The prompt tokens that wait: of requests that were submitted and have not begun to run.

A queue of few long prompts holds up those behind it as much as one of many short prompts, and its tokens need memory,
so it is bounded by both. Belongs to the local client; a preempted sequence has begun and does not count.
"""

from __future__ import annotations

from functools import partial

from aserve.core.capacity import Capacity
from aserve.engine.admission import FreePlaces
from aserve.engine.mailbox import Mailbox


class WaitingPrompts:
    """Counts by mailbox, one per request; ``n`` choices share a prompt and count it once."""

    def __init__(self) -> None:
        self._by_mailbox: dict[Mailbox, tuple[int, int]] = {}
        self.num_tokens = 0

    def enter(self, mailbox: Mailbox, num_tokens: int, num_sequences: int) -> None:
        """Count a request until its first choice begins, or it leaves."""
        self._by_mailbox[mailbox] = num_tokens, num_sequences
        self.num_tokens += num_tokens
        mailbox.on_admitted = partial(self.leave, mailbox)

    def leave(self, mailbox: Mailbox) -> None:
        """Count it no more. Idempotent."""
        self.num_tokens -= self._by_mailbox.pop(mailbox, (0, 0))[0]
        mailbox.on_admitted = None

    def num_tokens_beyond(self, free: FreePlaces, capacity: Capacity) -> int:
        """The tokens of those that cannot run at once. The others, in the order of their coming, take their places."""
        num_tokens = self.num_tokens
        for length, num_sequences in self._by_mailbox.values():
            if not free.take(num_sequences, capacity.num_blocks_for(length + 1)):
                break
            num_tokens -= length
        return num_tokens
