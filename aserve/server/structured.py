"""What an answer has to look like, in the forms in which clients say it, as one ``Grammar``.

OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*``, llama.cpp's ``json_schema`` and
``grammar``. Whether a schema or grammar can be kept to is found out when it is compiled; errors then name the field
that it came from. Used by the schemas and by ``prepare``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, cast

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from aserve.core.errors import InvalidGrammarError, InvalidRequestError, UnsupportedFieldError
from aserve.core.grammar import Grammar, GrammarKind
from aserve.server.validation import RuleError

if TYPE_CHECKING:
    from aserve.engine.engine import Engine

MAX_CHOICES_TO_PICK = 10_000


class Constraint(NamedTuple):
    """A grammar and the request field that it came from."""

    grammar: Grammar
    param: str


def _read_schema(value: Any) -> dict[str, Any] | None:
    """A schema as an object, or as text of JSON."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise RuleError("is not valid JSON") from None
    if value is not None and not isinstance(value, dict):
        raise RuleError("must be a JSON schema: an object")
    return cast(dict[str, Any] | None, value)


Schema = Annotated[dict[str, Any], BeforeValidator(_read_schema, json_schema_input_type=dict[str, Any] | str)]
Pattern = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES_TO_PICK)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=False)


class NamedSchema(_Strict):
    """``response_format.json_schema``. A name and a description are taken without effect.

    ``strict`` makes no difference: what the schema says holds either way.
    """

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's ``response_format``; llama.cpp's has a schema beside the type ``json_object``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            problem = "belongs to" if self.json_schema is not None else "is required for"
            raise RuleError(f"{problem} the type 'json_schema'", where=("json_schema",))
        if self.schema_ is not None and self.type != "json_object":
            raise RuleError("belongs to the type 'json_object'", where=("schema",))
        return self

    def constraint(self) -> Constraint | None:
        """What it asks for; None for any text."""
        if self.json_schema is not None:
            return of_schema(self.json_schema.schema_, "response_format.json_schema.schema")
        if self.schema_ is not None:
            return of_schema(self.schema_, "response_format.schema")
        if self.type == "json_object":
            return Constraint(Grammar(GrammarKind.JSON_OBJECT), "response_format")
        return None


class StructuredOutputs(_Strict):
    """vLLM's ``structured_outputs``: at most one of these."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None

    def constraints(self) -> list[Constraint]:
        """What it asks for."""
        found = list(named("structured_outputs.", self.json_, self.regex, self.choice, self.grammar))
        if self.json_object:
            found.append(Constraint(Grammar(GrammarKind.JSON_OBJECT), "structured_outputs.json_object"))
        return found


def named(
    prefix: str, json: dict[str, Any] | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterable[Constraint]:
    """Constraints of the fields ``json``, ``regex``, ``choice`` and ``grammar`` with some prefix."""
    if json is not None:
        yield of_schema(json, f"{prefix}json")
    if regex is not None:
        yield Constraint(Grammar(GrammarKind.REGEX, regex), f"{prefix}regex")
    if choice is not None:
        yield Constraint(Grammar(GrammarKind.CHOICE, _text(choice)), f"{prefix}choice")
    if grammar is not None:
        yield Constraint(Grammar(GrammarKind.LARK, grammar), f"{prefix}grammar")


def only_one(constraints: list[Constraint]) -> Constraint | None:
    """Return it, if there is one. Raises RuleError for several: an answer keeps to one grammar."""
    if len(constraints) > 1:
        first, second, *_ = constraints
        raise RuleError(f"cannot stand beside '{first.param}': an answer keeps to one of them", where=(second.param,))
    return constraints[0] if constraints else None


async def compile_for(engine: Engine, constraint: Constraint) -> None:
    """Have the grammar ready, so that a wrong one is refused by its field's name.

    Raises InvalidGrammarError, GrammarTimeoutError, UnsupportedFieldError, PromptError.
    """
    try:
        await engine.compile_grammar(constraint.grammar)
    except (InvalidGrammarError, UnsupportedFieldError) as error:
        raise type(error)(f"'{constraint.param}': {error.message}", param=constraint.param) from error


def of_schema(schema: dict[str, Any], param: str) -> Constraint:
    """The constraint of a JSON schema."""
    return Constraint(Grammar(GrammarKind.JSON_SCHEMA, _text(schema)), param)


def _text(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except (TypeError, orjson.JSONEncodeError) as error:  # half a surrogate pair
        raise InvalidRequestError("a schema or choice cannot be written as JSON") from error
