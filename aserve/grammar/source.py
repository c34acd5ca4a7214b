"""From the source of a grammar to what llguidance reads, and from its complaints to sentences for the client.

What llguidance would take without keeping to it, or would not survive, is refused here: its compiler recurses along
references, and a native stack that overflows ends the process. Pure.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from aserve.core.errors import InvalidGrammarError
from aserve.core.grammar import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # a name of its stubs only

MAX_SOURCE = 512 * 1024
"""Characters of a source; as many again if it is JSON with short escapes."""

MAX_REFERENCES = 1000
"""Of ``$ref`` in a schema, and rules of a context-free grammar: each can be one level of native recursion."""

_WHITESPACE = r"( |\n[ \t]{0,20})?"
"""Between the tokens of JSON: as people and models write it, and never without end (llama.cpp's rule)."""

_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": _WHITESPACE,
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
"""They overrule ``x-guidance`` in a schema, which could turn off the refusal of keywords that are not supported."""

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_MAX_SHOWN = 300


def to_native(grammar: Grammar) -> str:
    """Return llguidance's form of a grammar, which may still be refused when it is compiled.

    Raises InvalidGrammarError.
    """
    source = grammar.source
    if len(source) > MAX_SOURCE:
        raise InvalidGrammarError(f"the grammar has {len(source)} characters, at most {MAX_SOURCE} are allowed")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_schema(source)
        case GrammarKind.JSON_OBJECT:
            return _from_schema({"type": "object"})
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(source)
        case GrammarKind.CHOICE:
            return _choice(source)
        case GrammarKind.LARK:
            return _context_free(source)


def explain(complaint: str) -> str:
    """Say in one line what llguidance found wrong with a grammar."""
    if unimplemented := _UNIMPLEMENTED.search(complaint):
        keywords = unimplemented.group(1).replace('"', "'")
        return f"keywords that are not supported: {keywords}"
    if complaint.startswith("oneOf constraints"):
        return "keywords that are not supported: 'oneOf', unless its branches exclude each other; 'anyOf' may do"
    if complaint.startswith("panic"):
        return "it cannot be compiled"
    text = " ".join(complaint.split())
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _json_schema(source: str) -> str:
    try:
        schema: Any = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammarError(f"the JSON schema is not JSON: {explain(str(error))}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidGrammarError("the JSON schema must be an object, or true")
    return _from_schema(cast(dict[str, Any], schema))


def _from_schema(schema: dict[str, Any]) -> str:
    try:
        text = json.dumps(schema)
        _check_references(text.count('"$ref"'))
        return LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammarError(f"the JSON schema cannot be read: {explain(str(error))}") from None


def _choice(source: str) -> str:
    try:
        choices: Any = json.loads(source)
    except (ValueError, RecursionError):
        raise InvalidGrammarError("the choices are not JSON") from None
    if not isinstance(choices, list) or not choices:
        raise InvalidGrammarError("the choices must be an array of at least one string")
    for choice in cast(list[Any], choices):
        if not isinstance(choice, str) or not choice:
            raise InvalidGrammarError("each choice must be a string that is not empty")
        if not choice.isascii() and _has_surrogate(choice):
            raise InvalidGrammarError("a choice holds half of a surrogate pair, which is no character")
    # as regular expressions, since literals of Lark know only some of JSON's escapes
    one_of = "|".join(map(_escaped, cast(list[str], choices)))
    return LLMatcher.grammar_from_regex(f"({one_of})")


def _escaped(text: str) -> str:
    return "".join(c if c.isalnum() else rf"\u{{{ord(c):x}}}" for c in text)


def _has_surrogate(text: str) -> bool:
    return any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def _context_free(source: str) -> str:
    # an escape can write "$ref" in other ways within %json
    _check_references(source.count("\n") + source.count("$ref") + source.count("\\u"))
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(source))
    except (Exception, RecursionError) as error:
        raise InvalidGrammarError(f"the grammar cannot be read: {explain(str(error))}") from None


def _check_references(number: int) -> None:
    if number > MAX_REFERENCES:
        raise InvalidGrammarError(
            f"the grammar has {number} rules or references, at most {MAX_REFERENCES} are supported"
        )
