"""What a client asks for, as frozen values: sampling parameters, one sequence's request, one user's request.

A ``GenerationRequest`` is what a user sent (one prompt, ``n`` choices); the engine turns it into ``n`` ``Request``s,
which are all the scheduler ever sees. Values are validated when they enter the engine, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from aserve.core.grammar import Grammar
from aserve.core.pooling import PoolingParams

RequestId = str
"""Unique among the live requests of one engine; choice ``i`` of a user's request ``x`` is ``x-i``."""


class FinishReason(StrEnum):
    """Why a sequence ended. The value is the OpenAI ``finish_reason``, except ``ERROR``, which becomes an error."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence picks its tokens.

    Attributes:
        max_tokens: most tokens to generate, at least 1; already clamped to the capacity by the caller.
        min_tokens: ``stop_token_ids`` cannot be sampled before this many tokens were generated.
        temperature: 0 is greedy; values up to 1e-5 count as 0.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 is off, 0 keeps one.
        min_p: drop tokens less likely than this share of the most likely one; 0 is off.
        seed: with the position it determines the random number of each token (unsigned 64 bit).
        presence_penalty: subtracted once from logits of tokens generated so far.
        frequency_penalty: subtracted once per occurrence among tokens generated so far.
        repetition_penalty: divides positive and multiplies negative logits of prompt and generated tokens; 1 is off.
        logit_bias: (token id, value) pairs added to the logits, by ascending id.
        stop_token_ids: ids that end the sequence, end-of-text ids included unless the request ignores them; sorted.
        num_logprobs: None for none, else how many alternatives to report beside the sampled token (0 to 20).
        grammar: what the text has to look like; ids that end it come only where it may end.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate, as the scheduler sees it.

    Attributes:
        prompt_token_ids: at least one id.
        priority: lower runs first (only under the priority policy).
        arrival_index: a counter, not a clock; among equal priorities the lower one is admitted first.
        cache_salt: prefix-cache entries are shared only between requests of equal salt.
        pooling: makes a vector of the prompt, in place of tokens; ``sampling`` then says nothing.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    arrival_index: int = 0
    cache_salt: bytes = b""
    pooling: PoolingParams | None = None

    @property
    def max_length(self) -> int:
        """Prompt and generated tokens together, at most."""
        return len(self.prompt_token_ids) + (self.sampling.max_tokens if self.pooling is None else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What one user asked for: a prompt and ``n`` choices of continuation.

    Attributes:
        sampling: of choice 0; choice ``i`` gets a seed derived from ``sampling.seed`` and ``i``.
        stop: strings that end a choice; matched on the text, across token borders.
        include_stop: keep the matched stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        pooling: makes a vector of the prompt, in place of an answer; there is one choice then, and all that is about
            tokens says nothing.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: bytes = b""
    pooling: PoolingParams | None = None


class TokenLogprobs(NamedTuple):
    """Log-probabilities (natural log) of one sampled token and its alternatives, most likely first."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


class TextDelta(NamedTuple):
    """Everything new about one choice since its last delta.

    ``token_ids`` may run ahead of ``text``: text is held back while it could still become a stop string or while a
    character is incomplete. ``num_cached_tokens`` is how many prompt tokens came from the prefix cache.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int
