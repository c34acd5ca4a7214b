"""What a chunk of a prompt takes of a step's budget: its tokens, each the dearer the more context it attends to.

A budget in tokens alone bounds the time of a step only as long as contexts are short: a token at position 100,000 of a
7B model takes ten times as long as the first. Here a chunk that starts at ``start`` pays ``1 + start / parity_context``
per token, where a layer with a window counts no more of ``start`` than its window. The context within the chunk is left
out, so a chunk at the beginning pays for its tokens only, and none takes longer than one there with the same budget.

Whole numbers only, so that plans are the same on every machine. Called by the scheduler for prompts, never for decodes.
"""

from __future__ import annotations

from aserve.core.capacity import Capacity


class ContextCost:
    """Prices of chunks, in tokens without context."""

    def __init__(self, capacity: Capacity) -> None:
        self._windows = capacity.windows
        # the price per token is a fraction: this over ``_unit``, which stands for a token without context
        self._unit = (capacity.parity_context or 0) * capacity.num_groups

    def chunk(self, start: int, budget: int) -> int:
        """Most tokens from ``start`` that a positive budget pays for; at least one, so that a prompt gets on."""
        if not self._unit:
            return budget
        return max(1, budget * self._unit // self._price(start))

    def price(self, start: int, num_tokens: int) -> int:
        """What so many tokens from ``start`` take of the budget, rounded up; no less than ``num_tokens``."""
        if not self._unit:
            return num_tokens
        return -(-num_tokens * self._price(start) // self._unit)

    def _price(self, start: int) -> int:
        return self._unit + sum(start if window is None else min(start, window) for window in self._windows)
