"""One line of a batch file: its JSON, checked, as the arguments of ``Engine.chat`` or ``Engine.complete``.

Ranges are the engine's to check; here is what JSON can get wrong: names and types.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, cast

from aserve.core.errors import InvalidRequestError, UnsupportedFieldError


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _are_ids(value: object) -> bool:
    return _is_list(value) and all(map(_is_whole, value))


def _are_stops(value: object) -> bool:
    return _is_text(value) or (_is_list(value) and all(map(_is_text, value)))


_TYPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "messages": (lambda value: _is_list(value) and bool(value), "a list of messages, at least one"),
    "prompt": (lambda value: _is_text(value) or _are_ids(value), "a text or a list of token ids"),
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "priority"), (_is_whole, "an integer")),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        (_is_number, "a number"),
    ),
    **dict.fromkeys(("ignore_eos", "include_stop", "skip_special_tokens"), (_is_flag, "true or false")),
    "stop": (_are_stops, "a text or a list of texts"),
    "stop_token_ids": (_are_ids, "a list of token ids"),
}


def parse_line(line: str) -> dict[str, Any]:
    """The fields of a line. Raises InvalidRequestError if it is not a JSON object, or was not UTF-8.

    Args:
        line: Read with ``errors="surrogateescape"``: a byte that is no UTF-8 is half of a surrogate pair here.
    """
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the line is not UTF-8 text") from error
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the line is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("the line is not a JSON object")
    return cast("dict[str, Any]", fields)


def take_line(fields: Mapping[str, Any]) -> tuple[list[Any] | None, Any, dict[str, Any]]:
    """Split checked fields into messages, prompt (one of the two is None) and options; null is the same as absent.

    Raises:
        UnsupportedFieldError: A field does not exist.
        InvalidRequestError: A field has a wrong type, or there is not exactly one of prompt and messages.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        if name not in _TYPES:
            raise UnsupportedFieldError(f"{name} is not a field of a line; there are {', '.join(_TYPES)}", param=name)
        is_right, what = _TYPES[name]
        if not is_right(value):
            raise InvalidRequestError(f"{name} must be {what}", param=name)
    messages, prompt = given.pop("messages", None), given.pop("prompt", None)
    if (messages is None) == (prompt is None):
        raise InvalidRequestError("a line needs either prompt or messages")
    return messages, prompt, given
