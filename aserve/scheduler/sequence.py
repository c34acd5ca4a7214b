"""One request's way through the scheduler: its tokens, its blocks and its counters.

Mutable, and written by the scheduler package alone. The one subtraction that everything follows from (vLLM's idea):
known tokens minus computed minus in flight is what is left to compute, be it a prefill, a chunk or a decode.
"""

from __future__ import annotations

from aserve.core.request import FinishReason, Request
from aserve.scheduler.policy import PolicyKey

NEVER = 2**63 - 1
"""As ``next_drop``: no group has a window."""


class Sequence:
    """A live request.

    Attributes:
        token_ids: prompt and generated tokens whose values are known.
        num_pending: tokens sampled by steps in flight, so that they exist but have no known value.
        num_computed: leading tokens whose KV is in the block tables, by committed steps.
        num_in_flight: tokens after those that submitted, uncommitted steps compute.
        block_tables: per KV group, the blocks in order of position, ``NO_BLOCK`` for those let go of behind a window;
            all of one length. Empty while waiting.
        num_covered: positions that the tables have blocks for.
        first_blocks: per group, how many leading entries of the table are ``NO_BLOCK``.
        next_drop: once so many tokens are computed, another block falls behind a window.
        block_hashes: prefix hashes of the leading full blocks, as far as they were needed.
        num_announced: leading positions whose blocks the executor has been told of.
        num_published_blocks: leading blocks offered to the prefix index.
        cache_epoch: epoch of the prefix cache in which it started; blocks are published in no other.
        slot: the executor's state for this sequence, -1 while waiting.
        last_step_id: the last submitted step with a row of this sequence, -1 before the first.
        epoch: counts preemptions; a step's row with another epoch computed KV that is gone.
        num_cached_blocks: blocks of a cached prefix when last looked for, -1 before; an estimate for the order.
        awaited_hash: prefix hash of the block for which it waits while a step in flight computes it.
        num_overtaken: how many that come after it in policy order were admitted before it for their cached prefix.
        num_cached_tokens: prompt tokens that came from the prefix cache when it first ran.
        keeps_to_grammar: its next token cannot be sampled before the last one's value has been read.
        finish_reason: set once it has ended; ``cancelled`` when it was ended from outside.
    """

    __slots__ = (
        "awaited_hash",
        "block_hashes",
        "block_tables",
        "cache_epoch",
        "cancelled",
        "epoch",
        "finish_reason",
        "first_blocks",
        "keeps_to_grammar",
        "key",
        "last_step_id",
        "max_length",
        "next_drop",
        "num_announced",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed",
        "num_covered",
        "num_in_flight",
        "num_overtaken",
        "num_pending",
        "num_published_blocks",
        "request",
        "slot",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, request: Request, key: PolicyKey) -> None:
        self.request = request
        self.key = key
        self.max_length = request.max_length + (request.pooling is not None)  # its vector takes a token's place
        self.keeps_to_grammar = request.sampling.grammar is not None
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        self.num_pending = 0
        self.num_computed = 0
        self.num_in_flight = 0
        self.block_tables: list[list[int]] = []
        self.num_covered = 0
        self.first_blocks: list[int] = []
        self.next_drop = NEVER
        self.block_hashes: list[bytes] = []
        self.num_announced = 0
        self.num_published_blocks = 0
        self.cache_epoch = 0
        self.slot = -1
        self.last_step_id = -1
        self.epoch = 0
        self.num_cached_blocks = -1
        self.awaited_hash: bytes | None = None
        self.num_overtaken = 0
        self.num_cached_tokens = -1
        self.finish_reason: FinishReason | None = None
        self.cancelled = False

    @property
    def num_known(self) -> int:
        """Tokens that exist, whether or not their values have been read."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_scheduled(self) -> int:
        """Tokens computed or being computed: the position at which the next row starts."""
        return self.num_computed + self.num_in_flight

    @property
    def num_to_compute(self) -> int:
        return self.num_known - self.num_scheduled

    @property
    def is_over(self) -> bool:
        return self.cancelled or self.finish_reason is not None

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Why the sequence ends with this token, the last of ``token_ids``; None if it goes on."""
        if token_id in self.stop_token_ids and (
            self.keeps_to_grammar or self._num_generated > self.request.sampling.min_tokens
        ):
            return FinishReason.STOP  # a grammar holds stop ids back itself, as far as it allows anything else
        if len(self.token_ids) >= self.max_length:
            return FinishReason.LENGTH
        return None

    def forget_kv(self) -> None:
        """Drop blocks, slot and progress in one go; what steps in flight compute no longer counts."""
        self.block_tables = []
        self.num_covered = 0
        self.first_blocks = []
        self.next_drop = NEVER
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_announced = 0
        self.num_published_blocks = 0
        self.slot = -1
        self.epoch += 1

    @property
    def _num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)
