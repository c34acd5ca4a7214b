"""Texts and token ids as fields of requests: one or several, in the four forms that OpenAI's routes take."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field

from aserve.server.validation import RuleError

TextOrIds = str | list[int]


def read_inputs(value: Any) -> list[TextOrIds]:
    """Text, an array of texts, an array of token ids, or an array of such arrays; as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RuleError("must be a string, an array of strings, or an array of token ids")
    items = cast(list[Any], value)
    if not items:
        raise RuleError("must not be empty")
    if isinstance(items[0], int) and not isinstance(items[0], bool):
        return [_read_ids(items, ())]
    if isinstance(items[0], str):
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise RuleError("must be a string like the ones before it", where=(index,))
        return items
    return [_read_ids(item, (index,)) for index, item in enumerate(items)]


def _read_ids(value: Any, where: tuple[int, ...]) -> list[int]:
    if not isinstance(value, list):
        raise RuleError("must be a string or an array of token ids", where=where)
    items = cast(list[Any], value)
    if not items:
        raise RuleError("must not be empty", where=where)
    if not all(type(item) is int for item in items):
        index = next(i for i, item in enumerate(items) if type(item) is not int)
        raise RuleError("must be a token id", where=(*where, index))
    return items


# the forms, for the interface's description
_Texts = Annotated[list[str], Field(min_length=1)]
_Ids = Annotated[list[int], Field(min_length=1)]
_IdLists = Annotated[list[_Ids], Field(min_length=1)]

Inputs = Annotated[list[Any], BeforeValidator(read_inputs, json_schema_input_type=str | _Texts | _Ids | _IdLists)]
"""A field in these forms; its value is a list of ``TextOrIds``."""


def read_texts(value: Any) -> list[str]:
    """A text or an array of texts, as a list."""
    items = cast(list[Any], value) if isinstance(value, list) else [value]
    if not items:
        raise RuleError("must not be empty")
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise RuleError("must be a string", where=(index,) if isinstance(value, list) else ())
    return items


Texts = Annotated[list[str], BeforeValidator(read_texts, json_schema_input_type=str | _Texts)]
"""A field that is a text or several."""
