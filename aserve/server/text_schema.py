"""The bodies of ``/tokenize``, ``/detokenize`` and ``/abort``. A field that is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aserve.server.chat_schema import ChatMessage
from aserve.server.json_body import parse_object
from aserve.server.schema import TokenId
from aserve.server.validation import RuleError, validate
from aserve.text.chat_template import RENDERING_OPTIONS, RESERVED_OPTIONS

_RESERVED_KWARGS = RESERVED_OPTIONS | RENDERING_OPTIONS
_OF_MESSAGES = ("add_generation_prompt", "chat_template_kwargs", "allow_control_tokens")


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: Annotated[str, Field(min_length=1)] | None = None


class TokenizeRequest(_Body):
    """A text, or messages that go through the model's chat template."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    allow_control_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RuleError("or 'messages' is required, one of them", where=("prompt",))
        if self.messages is not None and self.add_special_tokens:
            raise RuleError("goes with 'prompt': special tokens of messages are the template's", where=_SPECIAL)
        for name in _OF_MESSAGES if self.messages is None else ():
            if getattr(self, name) is not None:
                raise RuleError("goes with 'messages'", where=(name,))
        for name in self.chat_template_kwargs or {}:
            if name in _RESERVED_KWARGS:
                raise RuleError("cannot be set here", where=("chat_template_kwargs", name))
        return self


_SPECIAL = ("add_special_tokens",)


class DetokenizeRequest(_Body):
    tokens: Annotated[list[TokenId], Field(max_length=2**20)]


class AbortRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    request_id: Annotated[str, Field(min_length=1, max_length=256)]


def read_tokenize_request(body: bytes) -> TokenizeRequest:
    """Read and check a request's body. Raises InvalidRequestError, UnsupportedFieldError."""
    return validate(TokenizeRequest, parse_object(body))


def read_detokenize_request(body: bytes) -> DetokenizeRequest:
    """Likewise."""
    return validate(DetokenizeRequest, parse_object(body))


def read_abort_request(body: bytes) -> AbortRequest:
    """Likewise."""
    return validate(AbortRequest, parse_object(body))
