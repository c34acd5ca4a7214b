"""The bodies of ``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank``. A field that is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from aserve.server.inputs import Inputs, TextOrIds, Texts
from aserve.server.json_body import parse_object
from aserve.server.validation import RuleError, validate

MAX_INPUTS = 2048

_INT64 = 2**63


class PoolingFields(BaseModel):
    """Fields of all three. The last two are taken without effect."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: Annotated[str, Field(min_length=1)]
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    priority: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise RuleError("must be -1 or at least 1, but is 0", where=("truncate_prompt_tokens",))
        return self


class EmbeddingRequest(PoolingFields):
    input: Inputs
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_number(self) -> Self:
        _check_count(len(self.input), "input")
        return self

    @property
    def inputs(self) -> list[TextOrIds]:
        return self.input


class ScoreRequest(PoolingFields):
    text_1: Texts
    text_2: Texts

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        _check_count(len(self.text_2), "text_2")
        if len(self.text_1) not in (1, len(self.text_2)):
            raise RuleError(
                f"has {len(self.text_1)} texts: it must be one, or as many as the {len(self.text_2)} of 'text_2'",
                where=("text_1",),
            )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """What is scored: one text with each of several, or two lists side by side."""
        first = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(first, self.text_2, strict=True))


def _read_documents(value: Any) -> list[str]:
    """Texts, or objects with a ``text``."""
    if not isinstance(value, list):
        raise RuleError("must be an array of strings")
    texts: list[str] = []
    for index, item in enumerate(cast(list[Any], value)):
        text: Any = item
        if isinstance(item, dict):
            fields = cast(dict[str, Any], item)
            if set(fields) != {"text"}:
                raise RuleError("must have a 'text' and nothing else", where=(index,))
            text = fields["text"]
        if not isinstance(text, str):
            raise RuleError("must be a string, or an object with a 'text'", where=(index,))
        texts.append(text)
    if not texts:
        raise RuleError("must not be empty")
    return texts


class _Document(BaseModel):
    """The other form of a document, for the interface's description."""

    model_config = ConfigDict(extra="forbid")

    text: str


_Documents = Annotated[list[str | _Document], Field(min_length=1)]


class RerankRequest(PoolingFields):
    query: str
    documents: Annotated[list[str], BeforeValidator(_read_documents, json_schema_input_type=_Documents)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None

    @model_validator(mode="after")
    def _check_number(self) -> Self:
        _check_count(len(self.documents), "documents")
        return self


def _check_count(count: int, name: str) -> None:
    if count > MAX_INPUTS:
        raise RuleError(f"has {count} entries, at most {MAX_INPUTS} are allowed", where=(name,))


def read_embedding_request(body: bytes) -> EmbeddingRequest:
    """Read and check a request's body. Raises InvalidRequestError, UnsupportedFieldError."""
    return validate(EmbeddingRequest, parse_object(body))


def read_score_request(body: bytes) -> ScoreRequest:
    """Likewise."""
    return validate(ScoreRequest, parse_object(body))


def read_rerank_request(body: bytes) -> RerankRequest:
    """Likewise."""
    return validate(RerankRequest, parse_object(body))
