"""A plan being made: which sequence gets how many tokens, within the step's budget."""

from __future__ import annotations

from aserve.scheduler.sequence import Sequence

HASH_BUDGET = 512
"""Blocks hashed per plan beside a running batch: about 1 ms."""


class Draft:
    """Rows by sequence, in the order in which they were granted.

    Attributes:
        budget: tokens without context that may still be granted, 0 or less for none.
        has_streams: whether sequences decode in this step, to whom it should not take long.
        hash_budget: blocks that may still be hashed to look for prefixes.
        rows: granted tokens per sequence.
        filled: prefix hashes of the blocks that granted chunks make full.
        forthcoming: that, and the same of each step in flight.
        prefills: running sequences with more than one token to compute, in policy order.
        preempted: whether a sequence lost its blocks for this plan.
        num_promised_blocks: blocks that running prefills will need before they sample, and do not hold yet.
    """

    __slots__ = (
        "budget",
        "filled",
        "forthcoming",
        "has_streams",
        "hash_budget",
        "num_promised_blocks",
        "preempted",
        "prefills",
        "rows",
    )

    def __init__(self, budget: int, filled_in_flight: list[set[bytes]]) -> None:
        self.budget = budget
        self.hash_budget = HASH_BUDGET
        self.has_streams = False
        self.rows: dict[Sequence, int] = {}
        self.filled: set[bytes] = set()
        self.forthcoming = [*filled_in_flight, self.filled]
        self.prefills: list[Sequence] = []
        self.preempted = False
        self.num_promised_blocks = 0

    def grant(self, sequence: Sequence, num_tokens: int) -> None:
        self.rows[sequence] = num_tokens
        self.budget -= num_tokens

    def revoke(self, sequence: Sequence) -> None:
        """Take back a grant, if there is one. It is of a decode: who is preempted comes after all granted chunks."""
        self.budget += self.rows.pop(sequence, 0)
