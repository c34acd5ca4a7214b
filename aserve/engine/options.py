"""Keyword options of ``Engine.chat`` and ``Engine.complete``, checked and turned into a GenerationRequest.

The one place where sampling parameters are made: programs that embed the engine give these options by name, and the
HTTP server makes them of its wire models' fields.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import index
from typing import Any, TypedDict, cast

from aserve.core.errors import InvalidRequestError
from aserve.core.grammar import Grammar
from aserve.core.request import GenerationRequest, SamplingParams
from aserve.engine.limits import (
    FLAGS,
    NUMBERS,
    check_bias,
    check_flag,
    check_grammar,
    check_number,
    check_stop_strings,
    check_token_ids,
    check_type,
)


class GenerationOptions(TypedDict, total=False):
    """What may be said about an answer; what is absent or None has the default of the model, then of SamplingParams.

    ``max_tokens`` is cut to the room that the context leaves, and is all of it by default. ``seed`` is random by
    default. ``stop_token_ids`` come on top of the model's own end-of-text ids, which ``ignore_eos`` leaves out.
    """

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop_token_ids: Sequence[int] | None
    num_logprobs: int | None
    grammar: Grammar | None
    ignore_eos: bool | None
    n: int | None
    stop: str | Sequence[str] | None
    include_stop: bool | None
    skip_special_tokens: bool | None
    priority: int | None
    cache_salt: bytes | None


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "num_logprobs",
    "grammar",
)


def check_options(options: GenerationOptions) -> dict[str, Any]:
    """Return the options that say something: None is the same as absent.

    Raises TypeError for an option that does not exist, InvalidRequestError for a value of wrong type or out of range.
    """
    for name in options:
        if name not in GenerationOptions.__annotations__:
            raise TypeError(f"{name!r} is no option of an answer")
    given = {name: value for name, value in cast(dict[str, Any], options).items() if value is not None}
    for name, value in given.items():
        if name in NUMBERS:
            check_number(name, value)
        elif name in FLAGS:
            check_flag(name, value)
    check_type("cache_salt", given.get("cache_salt", b""), bytes, "bytes")
    check_type("logit_bias", given.get("logit_bias", {}), Mapping, "a mapping of token ids to numbers")
    check_bias(given.get("logit_bias", {}).items())
    for name in ("stop", "stop_token_ids"):
        check_type(name, given.get(name, ()), Collection, "one or several" if name == "stop" else "token ids")
    check_token_ids("stop_token_ids", given.get("stop_token_ids", ()))
    check_grammar(given.get("grammar"))
    check_stop_strings(_stop_strings(given))
    return given


def as_token_ids(prompt: Iterable[Any]) -> list[int]:
    """Return a prompt's ids as plain integers, numpy's included. Raises InvalidRequestError."""
    try:
        return [index(token_id) for token_id in prompt]
    except TypeError as error:
        raise InvalidRequestError(
            "the prompt must be a text or token ids, which are integers", param="prompt"
        ) from error


def _stop_strings(options: Mapping[str, Any]) -> tuple[str, ...]:
    stop = options.get("stop", ())
    return (stop,) if isinstance(stop, str) else tuple(stop)


def make_request(
    options: Mapping[str, Any],
    *,
    request_id: str,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    end_token_ids: Sequence[int],
    defaults: Mapping[str, float | int],
) -> GenerationRequest:
    """Build the request; ``options`` come from ``check_options``, ``max_tokens`` fits. ``min_tokens`` is cut to it."""
    sampling: dict[str, Any] = {**defaults, **{name: options[name] for name in _SAMPLING if name in options}}
    sampling["min_tokens"] = min(options.get("min_tokens", 0), max_tokens)
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
