"""``POST /v1/completions``: the prompt in its four forms and the fields that only plain completions have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from aserve.core.errors import UnsupportedFieldError
from aserve.server.inputs import Inputs, TextOrIds
from aserve.server.json_body import parse_object
from aserve.server.offered import UnknownFields, drop_fields_not_offered
from aserve.server.schema import MAX_TOP_LOGPROBS, SamplingFields
from aserve.server.validation import validate

DEFAULT_MAX_TOKENS = 16
MAX_SEQUENCES = 1024

Prompt = TextOrIds


class CompletionRequest(SamplingFields):
    prompt: Inputs
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[Prompt]:
        return self.prompt

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


_FIELDS = frozenset(CompletionRequest.model_fields)


def read_completion_request(body: bytes, unknown: UnknownFields = "refuse") -> CompletionRequest:
    """Read and check a request's body. Raises InvalidRequestError, UnsupportedFieldError."""
    fields = parse_object(body)
    best_of = fields.pop("best_of", None)
    request = validate(CompletionRequest, drop_fields_not_offered(fields, _FIELDS, unknown))
    if best_of is not None and (isinstance(best_of, bool) or best_of != request.num_choices):
        raise UnsupportedFieldError("'best_of' is not supported unless it equals 'n'", param="best_of")
    if len(request.prompts) * request.num_choices > MAX_SEQUENCES:
        raise UnsupportedFieldError(
            f"one request may ask for at most {MAX_SEQUENCES} choices of all prompts together", param="prompt"
        )
    return request
