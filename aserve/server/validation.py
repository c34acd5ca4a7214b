"""Turns validation failures into one sentence that names the field, without a word of the library behind it.

Used by the schemas only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from aserve.core.errors import AserveError, InvalidRequestError, UnsupportedFieldError

M = TypeVar("M", bound=BaseModel)

_KINDS = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of at most 64 bits",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}


def validate(model: type[M], body: dict[str, Any]) -> M:
    """Build the model. Raises InvalidRequestError (or UnsupportedFieldError) for the first mistake."""
    try:
        return model.model_validate(body)
    except ValidationError as failure:
        first = failure.errors(include_url=False)[0]
    raise _explain(first)


def place(location: Sequence[int | str]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            shown = part if len(part) <= 60 else part[:60] + "…"
            path += f".{shown}" if path else shown
    return path


def _explain(error: ErrorDetails) -> AserveError:
    where = place(error["loc"])
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "extra_forbidden":
        return UnsupportedFieldError(f"'{where}' is not a known request field", param=where or None)
    if kind == "missing":
        return InvalidRequestError(f"'{where}' is required", param=where)
    if kind in _KINDS:
        return InvalidRequestError(f"'{where}' must be {_KINDS[kind]}{_but(value)}", param=where)
    if kind == "value_error":
        return _from_rule(where, context["error"])
    if kind == "literal_error":
        return InvalidRequestError(f"'{where}' must be {context['expected']}{_but(value)}", param=where)
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "less_than_equal": ("at most", "le"),
        "greater_than": ("more than", "gt"),
        "less_than": ("less than", "lt"),
    }
    if kind in bounds:
        words, key = bounds[kind]
        return InvalidRequestError(f"'{where}' must be {words} {context[key]:g}{_but(value)}", param=where)
    if kind in ("too_long", "string_too_long"):
        return InvalidRequestError(f"'{where}' is too long: at most {context['max_length']} are allowed", param=where)
    if kind in ("too_short", "string_too_short"):
        return InvalidRequestError(f"'{where}' must not be empty", param=where)
    return InvalidRequestError(f"'{where}' is not valid" if where else "the request is not valid", param=where or None)


class RuleError(ValueError):
    """A rule of ours is broken. ``where`` is relative to the field that is being validated."""

    def __init__(self, problem: str, *, where: Sequence[int | str] = (), unsupported: bool = False) -> None:
        super().__init__(problem)
        self.where = where
        self.unsupported = unsupported


def _from_rule(where: str, error: Exception) -> AserveError:
    unsupported = False
    if isinstance(error, RuleError):
        inner = place(error.where)
        where += inner if inner.startswith("[") or not where or not inner else f".{inner}"
        unsupported = error.unsupported
    message = f"'{where}' {error}" if where else str(error)
    return (UnsupportedFieldError if unsupported else InvalidRequestError)(message, param=where or None)


def _but(value: Any) -> str:
    """The offending value, where it is short and harmless to repeat."""
    if value is None:
        return ", but is null"
    if isinstance(value, bool):
        return f", but is {str(value).lower()}"
    if isinstance(value, int | float):
        return f", but is {value:.6g}" if isinstance(value, float) else f", but is {value}"
    if isinstance(value, str):
        return f', but is "{value}"' if len(value) <= 40 and value.isprintable() else ", but is a string"
    if isinstance(value, list):
        return ", but is an array"
    if isinstance(value, dict):
        return ", but is an object"
    return ""
