"""Keyword options of ``Engine.chat`` and ``Engine.complete``, checked and turned into a GenerationRequest.

For programs that embed the engine; the HTTP server has its own wire models and speaks GenerationRequest directly.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from aserve.core.errors import InvalidRequestError
from aserve.core.request import GenerationRequest, SamplingParams


class GenerationOptions(TypedDict, total=False):
    """What may be said about an answer; whatever is not said has the default of the model, then of SamplingParams.

    ``max_tokens`` is cut to the room that the context leaves, and is all of it by default. ``seed`` is random by
    default. ``stop_token_ids`` come on top of the model's own end-of-text ids, which ``ignore_eos`` leaves out.
    """

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    stop_token_ids: Sequence[int]
    num_logprobs: int | None
    ignore_eos: bool
    n: int
    stop: str | Sequence[str]
    include_stop: bool
    skip_special_tokens: bool
    priority: int
    cache_salt: bytes


_RANGES: Mapping[str, tuple[float, float]] = {
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "temperature": (0, math.inf),
    "top_k": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "seed": (0, 2**64 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-9, math.inf),
    "num_logprobs": (0, 20),
    "n": (1, math.inf),
}
_INTEGERS = {"max_tokens", "min_tokens", "top_k", "seed", "num_logprobs", "n"}
_SAMPLING = (
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "num_logprobs",
)


def check_options(options: GenerationOptions) -> None:
    """Raise TypeError for an option that does not exist, InvalidRequestError for a value out of range."""
    for name in options:
        if name not in GenerationOptions.__annotations__:
            raise TypeError(f"{name!r} is no option of an answer")
    for name, (low, high) in _RANGES.items():
        value = options.get(name)
        if value is None:
            continue
        kind = int if name in _INTEGERS else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high or value == math.inf:
            limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            number = "an integer" if name in _INTEGERS else "a number"
            raise InvalidRequestError(f"{name} must be {number}, {limits}; got {value!r}", param=name)
    if not all(math.isfinite(value) for value in options.get("logit_bias", {}).values()):
        raise InvalidRequestError("logit_bias must hold finite numbers", param="logit_bias")
    if not all(_stop_strings(options)):
        raise InvalidRequestError("a stop string must not be empty", param="stop")


def _stop_strings(options: GenerationOptions) -> tuple[str, ...]:
    stop = options.get("stop", ())
    return (stop,) if isinstance(stop, str) else tuple(stop)


def make_request(
    options: GenerationOptions,
    *,
    request_id: str,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    end_token_ids: Sequence[int],
    defaults: Mapping[str, float | int],
) -> GenerationRequest:
    """Build the request; ``options`` have been checked, ``max_tokens`` fits."""
    check_options(options)
    given = cast(dict[str, Any], options)
    sampling: dict[str, Any] = {**defaults, **{name: given[name] for name in _SAMPLING if name in given}}
    seed = options.get("seed")
    ends = set(options.get("stop_token_ids", ()))
    if not options.get("ignore_eos", False):
        ends.update(end_token_ids)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=SamplingParams(
            **sampling,
            max_tokens=max_tokens,
            seed=secrets.randbits(64) if seed is None else seed,
            logit_bias=tuple(sorted(options.get("logit_bias", {}).items())),
            stop_token_ids=tuple(sorted(ends)),
        ),
        n=options.get("n", 1),
        stop=_stop_strings(options),
        include_stop=options.get("include_stop", False),
        skip_special_tokens=options.get("skip_special_tokens", True),
        priority=options.get("priority", 0),
        cache_salt=options.get("cache_salt", b""),
    )
