"""``POST /v1/completions``: the prompt in its four forms and the fields that only plain completions have."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field

from aserve.core.errors import UnsupportedFieldError
from aserve.server.json_body import parse_object
from aserve.server.offered import drop_fields_not_offered
from aserve.server.schema import MAX_TOP_LOGPROBS, SamplingFields
from aserve.server.validation import RuleError, validate

DEFAULT_MAX_TOKENS = 16
MAX_SEQUENCES = 1024

Prompt = str | list[int]


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _read_prompt(value: Any) -> list[Prompt]:
    """Text, an array of texts, an array of token ids, or an array of such arrays; as a list of prompts."""
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
    if not _is_ids(items):
        index = next(i for i, item in enumerate(items) if type(item) is not int)
        raise RuleError("must be a token id", where=(*where, index))
    return items


# the forms of a prompt, for the interface's description
_Texts = Annotated[list[str], Field(min_length=1)]
_Ids = Annotated[list[int], Field(min_length=1)]
_IdLists = Annotated[list[_Ids], Field(min_length=1)]


class CompletionRequest(SamplingFields):
    prompt: Annotated[list[Any], BeforeValidator(_read_prompt, json_schema_input_type=str | _Texts | _Ids | _IdLists)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[Prompt]:
        return self.prompt

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


_FIELDS = frozenset(CompletionRequest.model_fields)


def read_completion_request(body: bytes) -> CompletionRequest:
    """Read and check a request's body. Raises InvalidRequestError, UnsupportedFieldError."""
    fields = parse_object(body)
    best_of = fields.pop("best_of", None)
    request = validate(CompletionRequest, drop_fields_not_offered(fields, _FIELDS))
    if best_of is not None and (isinstance(best_of, bool) or best_of != request.num_choices):
        raise UnsupportedFieldError("'best_of' is not supported unless it equals 'n'", param="best_of")
    if len(request.prompts) * request.num_choices > MAX_SEQUENCES:
        raise UnsupportedFieldError(
            f"one request may ask for at most {MAX_SEQUENCES} choices of all prompts together", param="prompt"
        )
    return request
