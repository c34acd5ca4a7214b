"""Every kind of grammar: what it means, and what is refused before or while it is compiled."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from aserve.core.errors import InvalidGrammarError
from aserve.core.grammar import Grammar, GrammarKind
from aserve.grammar.source import MAX_REFERENCES, MAX_SOURCE

GBNF = 'root ::= item ("," item)*\nitem ::= "x" | [0-9]{1,2}'
LARK = 'start: item ("," item)*\nitem: "x" | /[0-9]{1,2}/'
JSON_IN_LARK = 'start: "call " %json {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'


@pytest.mark.parametrize("source", ["[a-c]{2}", "^[a-c]{2}$", "(?:a|b|c)[abc]"])
def test_a_regex_holds_for_the_whole_text(source, walk):
    rng = np.random.default_rng(1)
    said = {bytes(walk(Grammar(GrammarKind.REGEX, source)).run(rng)) for _ in range(20)}
    assert all(re.fullmatch(rb"[a-c]{2}", text) for text in said)
    assert len(said) > 3


@pytest.mark.parametrize(
    "choices", [["yes", "no"], ["a", "ab", "abc"], ['"}', "a\nb\t\\", "\u00e9\u4e2d\U0001f642", "\x7f", "[x]{2}.*"]]
)
def test_one_of_the_choices_is_said(choices, walk):
    rng = np.random.default_rng(2)
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(choices))
    said = {bytes(walk(grammar).run(rng)).decode() for _ in range(40)}
    assert said == set(choices)


@pytest.mark.parametrize("source", [GBNF, LARK])
def test_context_free_grammars_in_both_notations(source, walk):
    rng = np.random.default_rng(3)
    for _ in range(10):
        said = walk(Grammar(GrammarKind.LARK, source)).run(rng, closing=b"0")
        assert re.fullmatch(rb"(x|[0-9]{1,2})(,(x|[0-9]{1,2}))*", bytes(said))


def test_json_within_lark(walk):
    said = bytes(walk(Grammar(GrammarKind.LARK, JSON_IN_LARK)).run(np.random.default_rng(4)))
    assert said.startswith(b"call ")
    assert isinstance(json.loads(said[5:])["a"], bool)


def test_a_special_token_within_lark(walk):
    state = walk(Grammar(GrammarKind.LARK, 'start: "a" <|im_start|> "b"'))
    state.take(97)
    assert state.allowed() == [258]
    state.take(258)
    assert state.allowed() == [98]


def chain_of_schemas(length):
    definitions = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"type": "null"}]} for i in range(length)}
    return {"$defs": {**definitions, f"a{length}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return json.dumps(schema)


CHAIN = "\n".join(f'r{i}: r{i + 1} "x"' for i in range(5000))
WRONG = {
    "no JSON": (GrammarKind.JSON_SCHEMA, "{", "is not JSON"),
    "no schema": (GrammarKind.JSON_SCHEMA, "3", "must be an object"),
    "nothing validates": (GrammarKind.JSON_SCHEMA, "false", "must be an object"),
    "deep": (GrammarKind.JSON_SCHEMA, nested(400), "recursion limit"),
    "deeper": (GrammarKind.JSON_SCHEMA, '{"items":' * 50_000 + "{}" + "}" * 50_000, "is not JSON"),
    "many references": (GrammarKind.JSON_SCHEMA, json.dumps(chain_of_schemas(5000)), "references"),
    "long": (GrammarKind.REGEX, "a" * (MAX_SOURCE + 1), "characters"),
    "no regex": (GrammarKind.REGEX, "(a", "unclosed group"),
    "look-around": (GrammarKind.REGEX, "a(?!b)", "look-around"),
    "parentheses": (GrammarKind.REGEX, "(" * 20_000 + "a" + ")" * 20_000, "grammar cannot be used"),
    "no choices": (GrammarKind.CHOICE, "[]", "at least one"),
    "empty choice": (GrammarKind.CHOICE, '["a", ""]', "not empty"),
    "no string": (GrammarKind.CHOICE, "[1]", "string"),
    "half a character": (GrammarKind.CHOICE, '["\\ud800"]', "surrogate"),
    "no JSON choices": (GrammarKind.CHOICE, "a|b", "not JSON"),
    "no lark": (GrammarKind.LARK, "start: (", "grammar"),
    "unknown rule": (GrammarKind.LARK, "start: nowhere", "nowhere"),
    "no gbnf": (GrammarKind.LARK, 'root ::= "a', "grammar"),
    "deep gbnf": (GrammarKind.LARK, "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, "grammar"),
    "many rules": (GrammarKind.LARK, f'start: r0\n{CHAIN}\nr5000: "a"', "rules"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_source_is_refused_in_one_line(name, compiler):
    kind, source, word = WRONG[name]
    with pytest.raises(InvalidGrammarError) as info:
        compiler.compile(Grammar(kind, source))
    assert word in info.value.message
    assert "\n" not in info.value.message
    assert len(info.value.message) < 500


def test_as_many_references_as_are_allowed_need_no_deep_stack_to_be_followed(compiler, walk):
    """They are compiled on a deep one, in ``engine.grammar_threads``, and followed on an ordinary one."""
    from aserve.engine.grammar_threads import GrammarThreads

    sources = [
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(chain_of_schemas(MAX_REFERENCES - 10))),
        Grammar(
            GrammarKind.LARK,
            "start: T0\n" + "\n".join(f'T{i}: (T{i + 1} | "y") "x"' for i in range(990)) + '\nT990: "a"',
        ),
    ]
    held: list[object] = []
    threads = GrammarThreads(1)
    from queue import SimpleQueue

    done: SimpleQueue[None] = SimpleQueue()
    for grammar in sources:
        threads.run_soon(lambda grammar=grammar: done.put(held.append(compiler.compile(grammar))))
    for _ in sources:
        done.get(timeout=60)
    threads.close()
    for grammar in sources:
        assert walk(grammar).allowed()
