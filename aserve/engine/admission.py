"""What may enter the engine: requests that can run at all, and no more of them than the queue holds.

Checked on the event loop before anything is submitted, so that ``scheduler.add`` cannot fail on the step thread and
every refusal is still an HTTP status. Pure functions over values; used by the local client and by ``Engine.fit``.
"""

from __future__ import annotations

from dataclasses import dataclass

from aserve.core.capacity import Capacity
from aserve.core.config import SchedulerConfig
from aserve.core.errors import ContextLengthError, InvalidRequestError, TaskNotOfferedError
from aserve.core.request import GenerationRequest
from aserve.engine.limits import check_request
from aserve.scheduler import SchedulerStats

QUEUED_CACHES = 4
"""Prompts that wait may fill the KV cache so many times, unless the configuration says otherwise."""


def too_long(
    num_prompt_tokens: int, capacity: Capacity, *, param: str | None, at_least: bool = False
) -> ContextLengthError:
    """The error for a prompt that leaves no room for an answer."""
    have = f"at least {num_prompt_tokens}" if at_least else str(num_prompt_tokens)
    which = "context" if capacity.max_length == capacity.max_model_len else "KV cache"
    return ContextLengthError(
        f"the {which} holds {capacity.max_length} tokens, prompt and answer together, and the prompt has {have}; "
        "shorten the prompt",
        param=param,
    )


def fit(capacity: Capacity, num_prompt_tokens: int, max_tokens: int | None, *, param: str | None = None) -> int:
    """How many tokens may be generated: the wish, cut to the room that is left; None wishes for all of it.

    Raises ContextLengthError if the prompt leaves room for none.
    """
    room = capacity.max_new_tokens(num_prompt_tokens)
    if room < 1:
        raise too_long(num_prompt_tokens, capacity, param=param)
    return room if max_tokens is None else min(max_tokens, room)


def check_input(capacity: Capacity, num_tokens: int, *, param: str | None, at_least: bool = False) -> None:
    """Raise ContextLengthError if an input, which has no answer, is too long."""
    if num_tokens > capacity.max_length:
        have = f"at least {num_tokens}" if at_least else str(num_tokens)
        raise ContextLengthError(
            f"an input may have {capacity.max_length} tokens, and this one has {have}; shorten it, or set "
            f"truncate_prompt_tokens to at most {capacity.max_length}",
            param=param,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How much may wait for its first step.

    Attributes:
        max_sequences_waiting: sequences that wait.
        max_tokens_waiting: prompt tokens of the requests that wait; one that would wait alone may have more, and those
            that can run at once do not wait.
        max_wait_s: seconds that a request may be foreseen to wait; None for any.
    """

    max_sequences_waiting: int
    max_tokens_waiting: int
    max_wait_s: float | None = None

    @classmethod
    def of(cls, scheduler: SchedulerConfig, capacity: Capacity) -> QueueLimits:
        tokens = scheduler.max_queue_tokens
        return cls(
            max_sequences_waiting=scheduler.max_queue,
            max_tokens_waiting=QUEUED_CACHES * capacity.num_kv_tokens if tokens is None else tokens,
            max_wait_s=scheduler.max_queue_wait_s,
        )

    def max_sequences(self, capacity: Capacity) -> int:
        """How many sequences an engine can hold, running and waiting."""
        return self.max_sequences_waiting + capacity.max_num_seqs


def check_unit(num_sequences: int, most: int) -> None:
    """Refuse what the engine can never hold at once. Raises InvalidRequestError."""
    if num_sequences > most:
        raise InvalidRequestError(
            f"n must be between 1 and {most} here, over all prompts of a request together; got {num_sequences}",
            param="n",
        )


def validate(request: GenerationRequest, capacity: Capacity, vocab_size: int) -> None:
    """Refuse what would break the step loop or could never run. Raises InvalidRequestError, ContextLengthError."""
    check_request(request)
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        raise InvalidRequestError("the prompt is empty: it needs at least one token", param="prompt")
    if request.pooling is None and capacity.whole_prompts:
        raise TaskNotOfferedError("this model makes vectors and scores, no answers")
    if request.pooling is not None:
        check_input(capacity, len(prompt), param="prompt")
    elif fit(capacity, len(prompt), sampling.max_tokens, param="prompt") != sampling.max_tokens:
        raise ContextLengthError(
            f"the prompt of {len(prompt)} tokens and max_tokens {sampling.max_tokens} exceed the {capacity.max_length} "
            "tokens that prompt and answer may have together",
            param="max_tokens",
        )
    ids = (
        ("prompt" if request.pooling is None else "input", prompt),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", tuple(i for i, _ in sampling.logit_bias)),
    )
    for name, values in ids:
        if values and not (min(values) >= 0 and max(values) < vocab_size):
            wrong = next(i for i in values if not 0 <= i < vocab_size)
            raise InvalidRequestError(
                f"{name}: {wrong} is not a token id; they go from 0 to {vocab_size - 1}", param=name
            )


@dataclass(slots=True)
class FreePlaces:
    """What could run at once beside what runs: places in the batch and blocks of the KV cache.

    There are none while something waits, which goes first.
    """

    num_sequences: int
    num_blocks: int

    @classmethod
    def of(cls, stats: SchedulerStats, capacity: Capacity) -> FreePlaces:
        if stats.num_waiting:
            return cls(0, 0)
        return cls(capacity.max_num_seqs - stats.num_running, stats.num_blocks - stats.num_used_blocks)

    def take(self, num_sequences: int, num_blocks_each: int) -> bool:
        """Take places for these sequences, if there are any for all of them."""
        num_blocks = num_sequences * num_blocks_each
        if num_sequences > self.num_sequences or num_blocks > self.num_blocks:
            return False
        self.num_sequences -= num_sequences
        self.num_blocks -= num_blocks
        return True


def num_too_many(
    stats: SchedulerStats,
    capacity: Capacity,
    *,
    max_queue: int,
    num_unfinished: int,
    num_new: int,
    num_prompt_tokens: int,
) -> int:
    """How many sequences the queue would hold beyond ``max_queue`` if these new ones were let in; 0 or less is fine.

    ``num_unfinished`` counts at once what ``stats`` shows only after the next step, so a burst between two steps
    cannot pass. A place in the batch counts as free when nothing waits for it and the KV cache has room for prompts
    like this one; an engine with nothing to do refuses nobody.
    """
    if not num_unfinished:
        return 0
    free = FreePlaces.of(stats, capacity)
    num_fitting = free.num_blocks // capacity.num_blocks_for(num_prompt_tokens + 1)
    num_free = max(0, min(free.num_sequences, num_fitting))
    return num_unfinished + num_new - stats.num_running - num_free - max_queue
