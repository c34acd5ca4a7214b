"""Which values the fields of a request may have: types and ranges, whoever filled them in.

A wrong one would fail on the step thread and take every other request with it, so whatever enters the engine is
checked: by ``admission`` for all requests, by ``options`` for keyword options before anything else happens. Pure; what
depends on the model (token ids, lengths) is admission's. All of it raises InvalidRequestError naming the field.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from aserve.core.errors import InvalidRequestError
from aserve.core.grammar import Grammar, GrammarKind
from aserve.core.pooling import PoolingKind, PoolingParams
from aserve.core.request import GenerationRequest, SamplingParams

_MANY = 2**62  # with a prompt's length added still 64 bits
_HUGE = 1e30  # logits scaled by it are finite in float32, also divided by the smallest temperature


class Limits(NamedTuple):
    """The numbers from ``low`` to ``high``; integers if both are."""

    low: float
    high: float

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int)


NUMBERS: Mapping[str, Limits] = {
    "max_tokens": Limits(1, _MANY),
    "min_tokens": Limits(0, _MANY),
    "temperature": Limits(0.0, _HUGE),
    "top_k": Limits(0, _MANY),
    "top_p": Limits(0.0, 1.0),
    "min_p": Limits(0.0, 1.0),
    "seed": Limits(0, 2**64 - 1),
    "presence_penalty": Limits(-2.0, 2.0),
    "frequency_penalty": Limits(-2.0, 2.0),
    "repetition_penalty": Limits(1e-9, _HUGE),
    "num_logprobs": Limits(0, 20),
    "n": Limits(1, _MANY),
    "priority": Limits(-(2**63), 2**63 - 1),
}
FLAGS = ("ignore_eos", "include_stop", "skip_special_tokens")
_BIAS = Limits(-_HUGE, _HUGE)
_SAMPLING_NUMBERS = tuple(
    (name, limits) for name, limits in NUMBERS.items() if name in SamplingParams.__dataclass_fields__
)


def check_request(request: GenerationRequest) -> None:
    """Check every field, those of ``request.sampling`` included."""
    sampling: Any = request.sampling
    if not isinstance(sampling, SamplingParams):
        _refuse("sampling", "SamplingParams", sampling)
    for name, limits in _SAMPLING_NUMBERS:
        value = getattr(sampling, name)
        if value is not None or name != "num_logprobs":
            check_number(name, value, limits)
    for name, value in (("n", request.n), ("priority", request.priority)):
        check_number(name, value)
    check_flag("include_stop", request.include_stop)
    check_flag("skip_special_tokens", request.skip_special_tokens)
    check_type("request_id", request.request_id, str, "a string")
    check_type("cache_salt", request.cache_salt, bytes, "bytes")
    for name, values in (
        ("prompt", request.prompt_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("stop", request.stop),
    ):
        check_type(name, values, tuple, "a tuple")
    check_token_ids("prompt", request.prompt_token_ids)
    check_token_ids("stop_token_ids", sampling.stop_token_ids)
    check_bias(sampling.logit_bias)
    check_stop_strings(request.stop)
    check_grammar(sampling.grammar)
    if request.pooling is not None:
        check_pooling(request.pooling)
        if request.n != 1:
            _refuse("n", "1 where a vector is made", request.n)


def check_number(name: str, value: Any, limits: Limits | None = None) -> None:
    """Check type and range; the limits are those of the name unless given. Infinity and NaN are out of any."""
    low, high = limits = limits or NUMBERS[name]
    # a bool is an int, which nobody means here
    fits = type(value) is int or (isinstance(value, float) and not limits.is_integer)
    if not fits or not low <= value <= high:  # False for NaN, too
        kind = "an integer" if limits.is_integer else "a number"
        _refuse(name, f"{kind}, {_range(low, high)}", value)


def check_flag(name: str, value: Any) -> None:
    check_type(name, value, bool, "true or false")


def check_type(name: str, value: Any, kind: type | tuple[type, ...], known_as: str) -> None:
    if not isinstance(value, kind):
        _refuse(name, known_as, value)


def check_grammar(value: Any) -> None:
    """Check that it is a grammar, or None; what it says is read when it is compiled."""
    if value is None:
        return
    check_type("grammar", value, Grammar, "a Grammar")
    check_type("grammar", value.kind, GrammarKind, "of one of the kinds")
    check_type("grammar", value.source, str, "a text")


def check_pooling(pooling: Any) -> None:
    """Check every field; what the model can do is known to whoever made it."""
    check_type("pooling", pooling, PoolingParams, "PoolingParams")
    check_type("kind", pooling.kind, PoolingKind, "one of the kinds of pooling")
    check_flag("normalize", pooling.normalize)
    check_number("second_start", pooling.second_start, Limits(0, _MANY))
    if pooling.dimensions is not None:
        check_number("dimensions", pooling.dimensions, Limits(1, _MANY))


def check_token_ids(name: str, values: Collection[Any]) -> None:
    """Check that all are integers. Takes 2 ms for 100,000."""
    if not set(map(type, values)) <= {int}:
        _refuse(name, "token ids, which are integers", next(value for value in values if type(value) is not int))


def check_bias(pairs: Iterable[Any]) -> None:
    """Check (token id, value) pairs."""
    for pair in pairs:
        check_type("logit_bias", pair, tuple, "pairs of a token id and a number")
        if len(pair) != 2:
            _refuse("logit_bias", "pairs of a token id and a number", pair)
        check_token_ids("logit_bias", pair[:1])
        check_number("logit_bias", pair[1], _BIAS)


def check_stop_strings(strings: Collection[Any]) -> None:
    for string in strings:
        check_type("stop", string, str, "a string or several")
    if not all(strings):
        raise InvalidRequestError("a stop string must not be empty", param="stop")


def _range(low: float, high: float) -> str:
    if low >= 0 and high in (_MANY, _HUGE):  # a limit that nobody meets
        return f"at least {low:g}"
    return f"between {low:g} and {high:g}" if isinstance(low, float) else f"between {low} and {high}"


def _refuse(name: str, wanted: str, value: Any) -> NoReturn:
    text = repr(value)
    if len(text) > 100:
        text = text[:100] + "..."
    raise InvalidRequestError(f"{name} must be {wanted}; got {text}", param=name)
