"""What a random model says within a schema validates, for every keyword that is not refused by its name."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from grammar_schemas import REFUSED, SUPPORTED

from aserve.core.errors import InvalidGrammarError
from aserve.core.grammar import Grammar, GrammarKind


@pytest.mark.parametrize("name", SUPPORTED)
def test_whatever_is_said_within_a_schema_validates(name, walk):
    schema = SUPPORTED[name]
    # a date of the year 0000 is one for RFC 3339, not for Python
    formats = jsonschema.FormatChecker(["email", "ipv4", "uuid"])
    validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    rng = np.random.default_rng(0)
    ended = 0
    for _ in range(12):
        said = walk(grammar).run(rng)
        if said is not None:
            ended += 1
            validator.validate(json.loads(bytes(said)))
    assert ended >= 6, "most walks come to an end"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_kept_to_is_refused_by_name(name, compiler):
    with pytest.raises(InvalidGrammarError) as info:
        compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(REFUSED[name])))
    assert name.rsplit(": ", maxsplit=1)[-1] in info.value.message
    assert "\n" not in info.value.message
    assert len(info.value.message) < 500


def test_space_between_tokens_of_json_is_bounded(walk):
    state = walk(Grammar(GrammarKind.JSON_OBJECT))
    state.take(ord("{"))
    state.take(ord("\n"))
    for _ in range(20):
        assert ord(" ") in state.allowed()
        state.take(ord(" "))
    assert ord(" ") not in state.allowed()
    assert ord("}") in state.allowed()
