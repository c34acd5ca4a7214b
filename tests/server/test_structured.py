"""Structured output over HTTP: every form in which it is asked for, its errors by field, and the rest of the answer."""

from __future__ import annotations

import json
import re
import threading

import anyio
import jsonschema
import pytest

from aserve.core.errors import InvalidRequestError, UnsupportedFieldError
from aserve.core.grammar import GrammarKind
from aserve.server.chat_schema import read_chat_request
from aserve.server.completion_schema import read_completion_request
from aserve.testing import hash_letter

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GBNF = 'root ::= "yes" | "no"'


def compact(tokens: list[int], seed: int) -> int:
    """A model that often wants to close something."""
    return b'"""]}}0a:,'[hash_letter(tokens, seed) % 10]


def read(**fields):
    return read_chat_request(json.dumps({"model": "M", "messages": USER, **fields}).encode())


def read_plain(**fields):
    return read_completion_request(json.dumps({"model": "M", "prompt": "a", **fields}).encode())


FORMS = [
    ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        GrammarKind.JSON_SCHEMA,
        "response_format.json_schema.schema",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "schema": SCHEMA},
            }
        },
        GrammarKind.JSON_SCHEMA,
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        GrammarKind.JSON_SCHEMA,
        "response_format.schema",
    ),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarKind.JSON_SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "y|n"}}, GrammarKind.REGEX, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, GrammarKind.CHOICE, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": GBNF}}, GrammarKind.LARK, "structured_outputs.grammar"),
    ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, "guided_json"),
    ({"guided_regex": "y|n"}, GrammarKind.REGEX, "guided_regex"),
    ({"guided_choice": ["yes", "no"]}, GrammarKind.CHOICE, "guided_choice"),
    ({"guided_grammar": GBNF}, GrammarKind.LARK, "guided_grammar"),
    ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA, "json_schema"),
    ({"grammar": GBNF}, GrammarKind.LARK, "grammar"),
]
NOTHING = [
    {},
    {"response_format": None},
    {"response_format": {"type": "text"}},
    {"structured_outputs": None},
    {"structured_outputs": {}},
    {"structured_outputs": {"json_object": False}},
    {"grammar": ""},
    {"guided_choice": None},
]


def schema_format(**fields):
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


MALFORMED = [
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    (schema_format(name="n"), "response_format.json_schema.schema"),
    (schema_format(name="n", schema=[]), "response_format.json_schema.schema"),
    (schema_format(name=1, schema={}), "response_format.json_schema.name"),
    (schema_format(name="n", schema={}, strict="yes"), "response_format.json_schema.strict"),
    (schema_format(name="n", schema={}, more=1), "response_format.json_schema.more"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": [1]}, "guided_json"),
    ({"grammar": 1}, "grammar"),
]
REFUSED = [
    (schema_format(name="n", schema={"not": {}}), "response_format.json_schema.schema", "'not'"),
    (schema_format(name="n", schema={"type": "array", "uniqueItems": True}), None, "'uniqueItems'"),
    ({"structured_outputs": {"json": {"if": {}, "then": {}}}}, "structured_outputs.json", "'if', 'then'"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar", "nowhere"),
    ({"grammar": "root ::= nowhere"}, "grammar", "nowhere"),
    ({"json_schema": {"type": "nope"}}, "json_schema", "nope"),
]


@pytest.mark.parametrize("form", [read, read_plain])
@pytest.mark.parametrize(("fields", "kind", "param"), FORMS)
def test_each_form_becomes_a_grammar(form, fields, kind, param):
    grammar, found = form(**fields).constraint
    assert (grammar.kind, found) == (kind, param)
    if kind is GrammarKind.JSON_SCHEMA:
        assert json.loads(grammar.source) == SCHEMA


@pytest.mark.parametrize("fields", NOTHING)
def test_what_asks_for_nothing(fields):
    assert read(**fields).constraint is None


@pytest.mark.parametrize("form", [read, read_plain])
@pytest.mark.parametrize(("fields", "param"), MALFORMED)
def test_malformed_forms_are_refused_by_field(form, fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        form(**fields)
    assert caught.value.param == param
    assert not re.search(r"pydantic|Error\b", caught.value.message)


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"structural_tag": "{}"}},
        {"structured_outputs": {"whitespace_pattern": " "}},
        {"guided_whitespace_pattern": " "},
        {"guided_decoding_backend": "outlines"},
        {"structural_tag": "{}"},
    ],
)
def test_what_is_not_offered_is_refused_by_name(fields):
    with pytest.raises(UnsupportedFieldError) as caught:
        read(**fields)
    assert caught.value.param.rpartition(".")[2] in json.dumps(fields)


@pytest.mark.anyio
class TestAnswers:
    @pytest.mark.parametrize(("fields", "kind", "param"), FORMS)
    @pytest.mark.parametrize("stream", [False, True])
    async def test_they_keep_to_what_was_asked(self, serving, fields, kind, param, stream):
        async with serving(next_token=compact) as client:
            answer = await client.chat(max_tokens=200, stream=stream, **fields)
            assert answer.status == 200
            if stream:
                chunks = [
                    json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")
                ]
                choices = [choice for chunk in chunks for choice in chunk["choices"]]
                text = "".join(choice["delta"].get("content") or "" for choice in choices)
                reason = choices[-1]["finish_reason"]
            else:
                choice = answer.json["choices"][0]
                text, reason = choice["message"]["content"], choice["finish_reason"]
            assert reason == "stop"
            if kind is GrammarKind.JSON_SCHEMA:
                jsonschema.validate(json.loads(text), SCHEMA)
            elif kind is GrammarKind.JSON_OBJECT:
                assert isinstance(json.loads(text), dict)
            else:
                assert text in ("yes", "no", "y", "n")

    async def test_completions_have_it_too(self, serving):
        async with serving() as client:
            answer = await client.complete(n=2, prompt=["a", "b"], structured_outputs={"choice": ["red", "blue"]})
            assert len(answer.json["choices"]) == 4
            assert {choice["text"] for choice in answer.json["choices"]} <= {"red", "blue"}
            assert {choice["finish_reason"] for choice in answer.json["choices"]} == {"stop"}

    async def test_a_limit_cuts_it_and_says_so(self, serving):
        async with serving() as client:
            answer = await client.chat(max_tokens=2, structured_outputs={"regex": "[a-z]{3}"})
            assert answer.json["choices"][0]["finish_reason"] == "length"
            assert len(answer.json["choices"][0]["message"]["content"]) == 2

    async def test_a_stop_string_ends_it_where_it_is(self, serving):
        async with serving() as client:
            answer = await client.chat(stop="-", structured_outputs={"regex": "ab-cd"})
            assert answer.json["choices"][0]["message"]["content"] == "ab"
            assert answer.json["choices"][0]["finish_reason"] == "stop"

    @pytest.mark.parametrize(("fields", "param", "word"), REFUSED)
    async def test_what_cannot_be_kept_to_is_a_400_by_field(self, serving, fields, param, word):
        async with serving() as client:
            answer = await client.chat(stream=True, **fields)
            assert answer.status == 400
            error = answer.json["error"]
            assert word in error["message"]
            assert error["param"] == param or param is None
            assert error["code"] == "invalid_grammar"
            await client.settled()
            assert (await client.chat(max_tokens=1)).status == 200

    async def test_a_client_that_leaves_while_its_grammar_is_compiled(self, serving, make_exchange, monkeypatch):
        begun, gate = threading.Event(), threading.Event()

        async with serving() as client:
            compiler = client.app.slot.engine._client._grammars._compiler
            compile_now = compiler.compile

            def slowly(grammar):
                begun.set()
                assert gate.wait(60)
                return compile_now(grammar)

            monkeypatch.setattr(compiler, "compile", slowly)
            body = {"model": "M", "messages": USER, "guided_regex": "slow"}
            exchange = make_exchange(json.dumps(body).encode())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(
                    client.run, exchange, "POST", "/v1/chat/completions", {"content-type": "application/json"}
                )
                await anyio.to_thread.run_sync(begun.wait, 60)
                assert (await client.chat(max_tokens=1)).status == 200, "others go on"
                exchange.disconnect()
            assert exchange.answer.status == 499
            gate.set()
            await client.settled()
