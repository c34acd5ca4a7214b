"""One user's request as the scheduler's sequences: their ids, seeds and order.

The rule is fixed, so that a request says the same wherever it is expanded and whatever it is batched with.
"""

from __future__ import annotations

from dataclasses import replace

from aserve.core.request import GenerationRequest, Request, RequestId

_MASK = 2**64 - 1


def sequence_id(request_id: RequestId, choice: int) -> RequestId:
    """The id of one choice's sequence."""
    return f"{request_id}-{choice}"


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice: the request's own for choice 0, an independent one for each further choice.

    SplitMix64's output function (Steele, Lea, Flood 2014) over the mixed seed plus the choice: choice 1 of seed 7 and
    choice 0 of seed 8 have nothing in common.
    """
    return seed if choice == 0 else _mix(_mix(seed) + choice)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def expand(request: GenerationRequest, first_arrival_index: int) -> tuple[Request, ...]:
    """The ``n`` sequences of a request, arriving in the order of their choices."""
    return tuple(
        Request(
            request_id=sequence_id(request.request_id, choice),
            prompt_token_ids=request.prompt_token_ids,
            sampling=replace(request.sampling, seed=choice_seed(request.sampling.seed, choice)),
            priority=request.priority,
            arrival_index=first_arrival_index + choice,
            cache_salt=request.cache_salt,
            pooling=request.pooling,
        )
        for choice in range(request.n)
    )
