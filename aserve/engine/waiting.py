"""The prompt tokens that wait: of requests that were submitted and have not begun to run.

A queue of few long prompts holds up those behind it as much as one of many short prompts, and its tokens need memory,
so it is bounded by both. Belongs to the local client; a preempted sequence has begun and does not count.
"""

from __future__ import annotations

from functools import partial

from aserve.engine.mailbox import Mailbox


class WaitingPrompts:
    """Counts by mailbox, one per request; ``n`` choices share a prompt and count it once."""

    def __init__(self) -> None:
        self._by_mailbox: dict[Mailbox, int] = {}
        self.num_tokens = 0

    def enter(self, mailbox: Mailbox, num_tokens: int) -> None:
        """Count a request until its first choice begins, or it leaves."""
        self._by_mailbox[mailbox] = num_tokens
        self.num_tokens += num_tokens
        mailbox.on_admitted = partial(self.leave, mailbox)

    def leave(self, mailbox: Mailbox) -> None:
        """Count it no more. Idempotent."""
        self.num_tokens -= self._by_mailbox.pop(mailbox, 0)
        mailbox.on_admitted = None
