"""OpenAI chat messages, brought into the form that chat templates expect.

Templates are written for text content, tool arguments as a mapping, and keys that are absent instead of null; clients
send lists of parts, arguments as JSON text, and nulls. Which of the forms a template can read is in
``TemplateFormat``, found out by ``chat_template``. Pure; the messages given are not modified.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from aserve.core.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak, whether a request comes over HTTP or from a program."""

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Kinds of content parts that are text."""


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """What a chat template reads.

    Attributes:
        content_parts: content is a list of ``{"type": "text", "text": ...}`` parts; else a string.
        arguments_as_text: arguments of tool calls are JSON text; else a mapping.
        developer_role: the template knows the role ``developer``; else such messages become ``system``.
    """

    content_parts: bool = False
    arguments_as_text: bool = False
    developer_role: bool = False


def normalise(messages: Sequence[Any], form: TemplateFormat) -> list[dict[str, Any]]:
    """Return messages for a template of this form.

    Raises:
        InvalidRequestError: a message is no object, or its content or tool calls have a wrong shape.
    """
    return [_message(message, index, form) for index, message in enumerate(messages)]


def _message(message: Any, index: int, form: TemplateFormat) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"messages[{index}] must be an object", param="messages")
    known = cast(dict[str, Any], message)
    if known.get("role") not in ROLES:
        raise InvalidRequestError(f"messages[{index}].role must be one of {', '.join(ROLES)}", param="messages")
    result = {key: value for key, value in known.items() if value is not None}
    text = _text(known.get("content"), index)
    result["content"] = [{"type": "text", "text": text}] if form.content_parts and text else text
    if result.get("role") == "developer" and not form.developer_role:
        result["role"] = "system"
    if calls := result.pop("tool_calls", None):
        result["tool_calls"] = _tool_calls(calls, index, form)
    return result


def _text(content: Any, index: int) -> str:
    """Content as one string: null is nothing, text parts are joined by line breaks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"messages[{index}].content must be a string or a list of parts", param="messages")
    texts: list[str] = []
    for number, part in enumerate(cast(list[Any], content)):
        place = f"messages[{index}].content[{number}]"
        if not isinstance(part, dict):
            raise InvalidRequestError(f"{place} must be an object", param="messages")
        fields = cast(dict[str, Any], part)
        kind = fields.get("type")
        text = fields.get("refusal" if kind == "refusal" else "text")
        if kind not in TEXT_PARTS:
            raise InvalidRequestError(f"{place} has type {kind!r}; only text can be read here", param="messages")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{place}.text must be a string", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(calls: Any, index: int, form: TemplateFormat) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"messages[{index}].tool_calls must be a list", param="messages")
    result: list[dict[str, Any]] = []
    for number, call in enumerate(cast(list[Any], calls)):
        fields = cast(dict[str, Any], call) if isinstance(call, dict) else {}
        function = fields.get("function")
        if not isinstance(function, dict):
            place = f"messages[{index}].tool_calls[{number}]"
            raise InvalidRequestError(f"{place} must be an object with a function", param="messages")
        named = cast(dict[str, Any], function)
        result.append({**fields, "function": {**named, "arguments": _arguments(named.get("arguments"), form)}})
    return result


def _arguments(arguments: Any, form: TemplateFormat) -> Any:
    """Arguments in the template's form. Blank ones are no arguments; what is no JSON object is passed on unchanged."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if form.arguments_as_text:
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
    if isinstance(arguments, str):
        try:
            parsed: Any = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return cast(Any, parsed) if isinstance(parsed, dict) else arguments
    return arguments
