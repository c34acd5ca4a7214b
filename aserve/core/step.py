"""The language between the scheduler and whatever executes a step: plans down, results up, events out.

Rows and events are NamedTuples, not frozen dataclasses: one is made per sequence and step, and a NamedTuple costs a
third of a frozen dataclass to build (0.3 against 1.0 us on CPython 3.11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from aserve.core.capacity import Capacity
from aserve.core.pooling import PoolingParams
from aserve.core.request import FinishReason, RequestId, SamplingParams, TokenLogprobs

PENDING = -1
"""Stands for a token that a step still in flight samples; the executor has it, the scheduler not yet."""

INVALID_TOKEN = -2
"""In a result: the row's logits, or its vector, were not finite, so there is nothing."""

POOLED = -3
"""In a result: the row's prompt is computed, and its vector stands in the place of a token."""

EXCLUDED_TOKEN = -4
"""In a result: every token was excluded, by the row's grammar and its other constraints together."""

GRAMMAR_FAILED = -5
"""In a result: the row's grammar could not be followed, by a fault of its matcher."""

NO_BLOCK = -1
"""In a block table: a position behind the group's window, which no row reads any more."""


class NewSequence(NamedTuple):
    """What the executor needs once, when a slot is given to a sequence (at admission and after each preemption).

    Attributes:
        sampling: how to sample.
        num_prompt_tokens: how many of the sequence's tokens are prompt (penalties treat them apart).
        prior_token_ids: the tokens before ``start``, whose KV came from the prefix cache.
        pooling: set for a prompt that is to become a vector; nothing is sampled then.
    """

    sampling: SamplingParams
    num_prompt_tokens: int
    prior_token_ids: tuple[int, ...]
    pooling: PoolingParams | None = None


class ScheduledSequence(NamedTuple):
    """One row of a plan: compute ``token_ids`` at positions ``[start, start + len(token_ids))``.

    Attributes:
        slot: index in ``[0, max_num_seqs)`` of the executor's per-sequence state; unique within a plan.
        token_ids: ids, or ``PENDING`` alone for the token that the step in flight samples for this slot.
        new_block_ids: per KV group, appended to the slot's block table by this row (the whole table when ``new`` is
            set; ``NO_BLOCK`` stands behind the window), equally many for each group; () when the row brings none.
        samples: whether the row's last position samples the next token, or completes the vector of a pooled prompt.
        new: set when the slot starts afresh; the executor forgets whatever the slot held.
    """

    request_id: RequestId
    slot: int
    start: int
    token_ids: tuple[int, ...]
    new_block_ids: tuple[tuple[int, ...], ...]
    samples: bool
    new: NewSequence | None


class BlockCopy(NamedTuple):
    """The whole content of a block, all layers of its group, between the KV cache and a slot of host memory."""

    block_id: int
    host_slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: prefill chunks and decodes mixed, in order. ``step_id`` counts up by one.

    The executor performs all ``saves``, then all ``restores``, then the rows, after everything of the plan before.

    Attributes:
        saves: blocks to be copied to host memory before anything overwrites them; no host slot twice.
        restores: blocks to be filled from host memory, from a slot of this plan's saves or of an earlier one's.
    """

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    saves: tuple[BlockCopy, ...] = ()
    restores: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled.

    Attributes:
        sampled: one token id (or one of the negative names above) per row with ``samples``, in plan order.
        logprobs: by index into ``sampled``, for the rows that asked.
        vectors: by index into ``sampled``, for the rows that are ``POOLED``: float32, little-endian.
        completed: indices into ``sampled`` of the tokens that complete their row's grammar: nothing may follow.
    """

    step_id: int
    sampled: tuple[int, ...]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    vectors: Mapping[int, bytes] = field(default_factory=dict[int, bytes])
    completed: frozenset[int] = frozenset()


class TokenEvent(NamedTuple):
    """One generated token of one request. ``finish_reason`` is set on the last one.

    On ``FinishReason.ERROR`` ``token_id`` says why: ``INVALID_TOKEN``, ``EXCLUDED_TOKEN`` or ``GRAMMAR_FAILED``. A
    pooled prompt has one event, with ``POOLED`` and its ``vector``: float32, little-endian. A last token with
    ``completes`` completes a grammar: unlike a stop token, it is part of the text.
    """

    request_id: RequestId
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    num_cached_tokens: int
    vector: bytes | None = None
    completes: bool = False


class StepExecutor(Protocol):
    """Runs plans in the order in which they are submitted. Used by one thread only."""

    @property
    def capacity(self) -> Capacity: ...

    def submit(self, plan: StepPlan) -> None:
        """Start a step without waiting for its result; at most ``capacity.max_in_flight`` may be unread."""
        ...

    def wait(self) -> StepResult:
        """Return the result of the oldest step not yet waited for; blocks."""
        ...

    def close(self) -> None:
        """Release memory and processes. Idempotent."""
        ...
