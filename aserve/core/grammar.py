"""What an answer has to look like, as plain values: the kind of a grammar and its source text.

Strings only, so that a grammar can be a key, be compared, and travel to another process. What a source means is known
to ``aserve.grammar`` alone, which compiles it for a tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    """How the source of a grammar is written."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema, as JSON text."""

    JSON_OBJECT = "json_object"
    """Any JSON object; the source is empty."""

    REGEX = "regex"
    """A regular expression for the whole text, without look-around and back references."""

    CHOICE = "choice"
    """One of several texts: a JSON array of strings, none of them empty."""

    LARK = "lark"
    """A context-free grammar in llguidance's dialect of Lark, whose start rule is ``start``, or in GBNF with ``root``.

    Within Lark, ``%json {...}`` stands for a value of a JSON Schema, and ``<name>`` for a special token.
    """


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text of an answer."""

    kind: GrammarKind
    source: str = ""
