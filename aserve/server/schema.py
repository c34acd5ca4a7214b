"""The request fields that chat and plain completions share.

Types are strict (no "5" for 5, no true for 1) and every limit is stated here. Reading a field's meaning into core
values is the work of ``prepare``; nothing here is on the path of a token.
"""

from __future__ import annotations

from typing import Annotated, Any, Self, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from aserve.server.structured import (
    Choices,
    Constraint,
    Pattern,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    named,
    of_schema,
    only_one,
)
from aserve.server.validation import RuleError

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20

_INT64 = 2**63


def _read_stop(value: Any) -> list[str]:
    """A string, or an array of them. Null means none."""
    if value is None:
        return []
    if not isinstance(value, str | list):
        raise RuleError("must be a string or an array of strings")
    items: list[Any] = [value] if isinstance(value, str) else cast(list[Any], value)
    if len(items) > MAX_STOPS:
        raise RuleError(f"has {len(items)} entries, at most {MAX_STOPS} are allowed")
    for index, item in enumerate(items):
        where = () if isinstance(value, str) else (index,)
        if not isinstance(item, str):
            raise RuleError("must be a string", where=where)
        if not item:
            raise RuleError("must not be an empty string", where=where)
    return items


def _read_logit_bias(value: Any) -> list[tuple[int, float]]:
    """An object of token id (as text) to bias. Null means none. Sorted by id."""
    if value is None:
        return []
    if not isinstance(value, dict):
        raise RuleError("must be an object of token id to number")
    pairs: dict[int, float] = {}
    for key, bias in cast(dict[Any, Any], value).items():
        if not isinstance(key, str) or not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise RuleError("has a key that is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise RuleError("must be a number", where=(key,))
        if not -100 <= bias <= 100:
            raise RuleError("must lie between -100 and 100", where=(key,))
        pairs[int(key)] = float(bias)
    return sorted(pairs.items())


TokenId = Annotated[int, Field(ge=0, lt=2**31)]

# what these fields look like before they are read, for the interface's description
_Biases = dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]
_Stop = Annotated[str, Field(min_length=1)]
_Stops = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]


class StreamOptions(BaseModel):
    """``stream_options``. ``include_obfuscation`` is taken without effect."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(BaseModel):
    """Fields of both routes. The last six are taken without effect, as hints to other servers."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=2 * _INT64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    logit_bias: Annotated[
        list[tuple[int, float]], BeforeValidator(_read_logit_bias, json_schema_input_type=_Biases | None)
    ] = []
    stop: Annotated[list[str], BeforeValidator(_read_stop, json_schema_input_type=_Stop | _Stops | None)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    json_schema: Schema | None = None
    grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RuleError("needs 'stream': true", where=("stream_options",))
        limit = self.token_limit
        if limit is not None and self.min_tokens is not None and self.min_tokens > limit:
            raise RuleError(f"is {self.min_tokens}, more than the token limit of {limit}", where=("min_tokens",))
        only_one(self._constraints())
        return self

    def _constraints(self) -> list[Constraint]:
        """What the answer has to look like, by every field that says so."""
        found = list(
            named("guided_", self.guided_json, self.guided_regex, self.guided_choice or None, self.guided_grammar)
        )
        found += named("", None, None, None, self.grammar or None)
        if self.json_schema is not None:
            found.append(of_schema(self.json_schema, "json_schema"))
        if self.structured_outputs is not None:
            found += self.structured_outputs.constraints()
        if self.response_format is not None and (asked := self.response_format.constraint()):
            found.append(asked)
        return found

    @property
    def constraint(self) -> Constraint | None:
        """What the answer has to look like; None leaves it free."""
        return only_one(self._constraints())

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate, as asked for; None leaves it to the route."""
        return self.max_tokens

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """None for no log-probabilities, else how many alternatives are reported."""
        raise NotImplementedError
