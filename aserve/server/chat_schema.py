"""``POST /v1/chat/completions``: the messages and the fields that only chat has."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from aserve.server.json_body import parse_object
from aserve.server.offered import UnknownFields, drop_fields_not_offered
from aserve.server.schema import MAX_TOP_LOGPROBS, SamplingFields
from aserve.server.validation import RuleError, validate
from aserve.text.chat_template import RENDERING_OPTIONS, RESERVED_OPTIONS
from aserve.text.messages import TEXT_PARTS

_RESERVED_KWARGS = RESERVED_OPTIONS | RENDERING_OPTIONS


def _read_content(value: Any) -> str | None:
    """A string, null, or an array of text parts, which are joined by line breaks."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RuleError("must be a string or an array of text parts")
    parts = cast(list[Any], value)
    if not parts:
        raise RuleError("must not be an empty array")
    texts: list[str] = []
    for index, part in enumerate(parts):
        if not isinstance(part, dict):
            raise RuleError("must be an object with 'type' and 'text'", where=(index,))
        part = cast(dict[str, Any], part)
        if part.get("type") not in TEXT_PARTS:
            raise RuleError("is not a text part; this server takes text only", where=(index,), unsupported=True)
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise RuleError("must be a string", where=(index, "text"))
        texts.append(text)
    return "\n".join(texts)


def _read_arguments(value: Any) -> dict[str, Any]:
    """The arguments of a past call, as a mapping: what chat templates walk through. Blank text means none."""
    if isinstance(value, dict):
        return cast(dict[str, Any], value)
    if not isinstance(value, str):
        raise RuleError("must be a string of JSON")
    if not value.strip():
        return {}
    try:
        parsed = orjson.loads(value)
    except orjson.JSONDecodeError:
        raise RuleError("is not valid JSON") from None
    if not isinstance(parsed, dict):
        raise RuleError("must be a JSON object")
    return cast(dict[str, Any], parsed)


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TextPart(BaseModel):
    """For the interface's description; what is read is ``_read_content``."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(BaseModel):
    """See ``TextPart``."""

    type: Literal["refusal"]
    refusal: str


_Parts = Annotated[list[TextPart | RefusalPart], Field(min_length=1)]


class CalledFunction(_Part):
    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[dict[str, Any], BeforeValidator(_read_arguments, json_schema_input_type=dict[str, Any] | str)]


class ToolCall(_Part):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class ChatMessage(_Part):
    """One turn. Fields that assistant messages of OpenAI clients carry as null are taken when null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_read_content, json_schema_input_type=str | _Parts | None)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise RuleError(f"is required for the role '{self.role}'", where=("content",))
        if self.tool_calls and self.role != "assistant":
            raise RuleError("belongs to the role 'assistant' only", where=("tool_calls",))
        if self.refusal and self.role != "assistant":
            raise RuleError("belongs to the role 'assistant' only", where=("refusal",))
        if self.refusal and self.content:
            raise RuleError("cannot stand beside 'content': a turn says one or the other", where=("refusal",))
        if self.annotations:
            raise RuleError("is not supported by this server", where=("annotations",), unsupported=True)
        return self

    def for_template(self) -> dict[str, Any]:
        """The turn as chat templates expect it: ``developer`` is ``system``, a refusal is what was said.

        No content is an empty one.
        """
        role = "system" if self.role == "developer" else self.role
        turn: dict[str, Any] = {"role": role, "content": self.content or self.refusal or ""}
        for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if (value := getattr(self, name)) is not None:
                turn[name] = value
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        return turn


class ChatRequest(SamplingFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    allow_control_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise RuleError("needs 'logprobs': true", where=("top_logprobs",))
        for name in self.chat_template_kwargs or {}:
            if name in _RESERVED_KWARGS:
                raise RuleError("cannot be set here", where=("chat_template_kwargs", name))
        return self

    @property
    def token_limit(self) -> int | None:
        """``max_completion_tokens`` goes before the older ``max_tokens``."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


_FIELDS = frozenset(ChatRequest.model_fields)


def read_chat_request(body: bytes, unknown: UnknownFields = "refuse") -> ChatRequest:
    """Read and check a request's body. Raises InvalidRequestError, UnsupportedFieldError."""
    return validate(ChatRequest, drop_fields_not_offered(parse_object(body), _FIELDS, unknown))
