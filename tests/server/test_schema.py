"""Every field's type and limits: what is refused, with which status, field and code; what is taken."""

from __future__ import annotations

import json
import re

import pytest

from aserve.core.errors import InvalidRequestError, UnsupportedFieldError
from aserve.server.chat_schema import read_chat_request
from aserve.server.completion_schema import read_completion_request

USER = {"role": "user", "content": "hi"}
LEAK = re.compile(r"Traceback|File \"|site-packages|/usr/|\.py\b|pydantic|torch\.|object at 0x|\b[A-Z]\w+Error\b")


def chat(**fields):
    return read_chat_request(json.dumps({"model": "M", "messages": [USER], **fields}).encode())


def completion(**fields):
    return read_completion_request(json.dumps({"model": "M", "prompt": "a", **fields}).encode())


def turn(**fields):
    return {"messages": [fields]}


def call(**function):
    return {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}]}


REFUSED_BY_BOTH = [
    ("model", [None, 3, "", ["M"]]),
    ("max_tokens", [-1, 0, "5", 5.5, 5.0, True, 10**20, [], {}]),
    ("min_tokens", [-1, "1", True]),
    ("temperature", [-0.1, 2.01, "1", True, []]),
    ("top_p", [-0.1, 1.0001, "1", True]),
    ("top_k", [-2, 1.5, "4", True, 2**31]),
    ("min_p", [-0.1, 1.5, "0"]),
    ("n", [0, -1, 129, "2", 1.5, True]),
    ("seed", ["1", 1.5, True, 2**65, -(2**63) - 1]),
    ("presence_penalty", [-2.5, 2.5, "0", True]),
    ("frequency_penalty", [-2.5, 2.5, "0"]),
    ("repetition_penalty", [0, -1, "1", True]),
    ("logit_bias", [[1], "x", {"a": 1}, {"-1": 1}, {"5": 101}, {"5": "x"}, {"5": True}, {"5": None}, {"1" * 30: 1}]),
    ("stop", ["", [""], [1], 5, {}, ["a"] * 17, [None]]),
    ("stop_token_ids", [[-1], ["a"], [True], 5, [1.5]]),
    ("ignore_eos", [1, "true"]),
    ("include_stop_str_in_output", [1]),
    ("skip_special_tokens", ["no"]),
    ("stream", [1, "true", 0]),
    ("stream_options", [{"include_usage": True}, 5]),
    ("priority", ["high", 1.5]),
    ("cache_salt", ["", 5, "x" * 1025]),
    ("user", [5, ["x"]]),
    ("metadata", [5, "x"]),
]


@pytest.mark.parametrize("read", [chat, completion])
@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in REFUSED_BY_BOTH for v in values], ids=str)
def test_refused_on_both_routes(read, field, value):
    with pytest.raises(InvalidRequestError) as caught:
        read(**{field: value})
    error = caught.value
    assert error.status == 400
    assert error.param.startswith(field)
    assert field in error.message
    assert not LEAK.search(error.message)


@pytest.mark.parametrize("read", [chat, completion])
@pytest.mark.parametrize("field", [f for f, _ in REFUSED_BY_BOTH if f != "model"])
def test_null_is_the_default(read, field):
    assert read(**{field: None}) == read()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": {"messages": [USER]}}, "messages"),
        ({"messages": [[USER]]}, "messages[0]"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": []}, "messages"),
        (turn(role="wizard", content="x"), "messages[0].role"),
        (turn(content="x"), "messages[0].role"),
        (turn(role="user"), "messages[0].content"),
        (turn(role="user", content=None), "messages[0].content"),
        (turn(role=7, content="x"), "messages[0].role"),
        (turn(role="user", content=5), "messages[0].content"),
        (turn(role="user", content=[]), "messages[0].content"),
        (turn(role="user", content=["x"]), "messages[0].content[0]"),
        (turn(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
        (turn(role="user", content="x", tool_calls=[]), None),
        (turn(role="user", content="x", name=5), "messages[0].name"),
        (call(name="f", arguments="[]"), "messages[0].tool_calls[0].function.arguments"),
        (call(name="f", arguments='{"v": '), "messages[0].tool_calls[0].function.arguments"),
        (call(name="f", arguments="null"), "messages[0].tool_calls[0].function.arguments"),
        (call(name="f"), "messages[0].tool_calls[0].function.arguments"),
        (call(arguments="{}"), "messages[0].tool_calls[0].function.name"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_refused_in_chat(fields, param):
    if param is None:
        chat(**fields)
        return
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert not LEAK.search(caught.value.message)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], ["x"]]}, "prompt[1][0]"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"logprobs": "2"}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 2000000000}, "logprobs"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"prompt": ["a"] * 9, "n": 128}, "prompt"),
        ({"messages": [USER]}, "messages"),
    ],
)
def test_refused_in_completions(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert not LEAK.search(caught.value.message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("functions", [{}]),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("prediction", {}),
        ("echo", True),
        ("suffix", "x"),
        ("reasoning_effort", "high"),
        ("use_beam_search", True),
        ("bad_words", ["x"]),
        ("prompt_logprobs", 1),
        ("chat_template", "x"),
        ("echo", 0),
        ("no_such_field", 1),
        ("no_such_field", None),
        ("x" * 1000, 1),
    ],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_what_is_not_offered_is_refused_by_name(read, field, value):
    with pytest.raises(UnsupportedFieldError) as caught:
        read(**{field: value})
    assert caught.value.status == 400
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param[:50] == field[:50]
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": None},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"echo": False},
        {"modalities": ["text"]},
        {"suffix": None},
        {"functions": None},
        {"parallel_tool_calls": True},
        {"bad_words": []},
        {
            "user": "u",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "auto",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
        },
    ],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_what_asks_for_nothing_is_taken(read, fields):
    read(**fields)


def test_fields_of_stream_options():
    assert chat(stream=True, stream_options={"include_usage": True}).stream_options.include_usage
    with pytest.raises(UnsupportedFieldError) as caught:
        chat(stream=True, stream_options={"other": True})
    assert caught.value.param == "stream_options.other"


def test_stop_forms():
    assert chat(stop="a").stop == chat(stop=["a"]).stop == ["a"]
    assert chat(stop=[]).stop == []
    assert len(chat(stop=["a"] * 16).stop) == 16


def test_token_limit_of_chat():
    assert chat(max_tokens=3, max_completion_tokens=5).token_limit == 5
    assert chat(max_tokens=3).token_limit == 3
    assert chat().token_limit is None
    assert chat(max_tokens=10**18).token_limit == 10**18


def test_prompt_forms():
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]
    assert completion(best_of=2, n=2).num_choices == 2


def test_messages_for_the_template():
    request = chat(
        messages=[
            {"role": "developer", "content": "d"},
            {"role": "user", "name": "u", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": " "}},
                    {"id": "d", "type": "function", "function": {"name": "g", "arguments": '{"v": 1}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
            {"role": "assistant", "content": ""},
        ]
    )
    assert [m.for_template() for m in request.messages] == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb", "name": "u"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}},
                {"id": "d", "type": "function", "function": {"name": "g", "arguments": {"v": 1}}},
            ],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": ""},
    ]


def test_a_refusal_is_what_the_turn_says():
    request = chat(messages=[{"role": "assistant", "content": c, "refusal": "I cannot"} for c in (None, "")])
    assert [m.for_template() for m in request.messages] == [{"role": "assistant", "content": "I cannot"}] * 2
    assert chat(messages=[{"role": "assistant", "content": "a", "refusal": ""}]).messages[0].for_template() == {
        "role": "assistant",
        "content": "a",
    }


@pytest.mark.parametrize(
    ("turn", "field", "kind"),
    [
        ({"role": "assistant", "content": "a", "refusal": "b"}, "refusal", InvalidRequestError),
        ({"role": "user", "content": "a", "refusal": "b"}, "refusal", InvalidRequestError),
        ({"role": "assistant", "content": "a", "annotations": [{"type": "x"}]}, "annotations", UnsupportedFieldError),
    ],
)
def test_what_a_turn_would_lose_is_refused(turn, field, kind):
    with pytest.raises(kind) as caught:
        chat(messages=[turn])
    assert caught.value.param == f"messages[0].{field}"


def test_parts_that_are_not_text_are_not_supported():
    with pytest.raises(UnsupportedFieldError) as caught:
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert caught.value.param == "messages[0].content[0]"


def test_logit_bias_is_sorted():
    assert chat(logit_bias={"7": -100, "3": 1.5}).logit_bias == [(3, 1.5), (7, -100.0)]


BROKEN = {
    "empty": b"",
    "blank": b"  \n",
    "cut": b'{"model":',
    "null": b"null",
    "list": b"[]",
    "string": b'"x"',
    "number": b"3",
    "nan": b'{"model":"M","prompt":"a","temperature":NaN}',
    "infinity": b'{"model":"M","prompt":"a","temperature":Infinity}',
    "overflow": b'{"model":"M","prompt":"a","temperature":1e999}',
    "deep": b"[" * 100000,
    "deep_field": b'{"model":"M","prompt":"a","user":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "long_integer": b'{"model":"M","prompt":"a","seed":1' + b"0" * 5000 + b"}",
    "not_utf8": b'{"model":"M","prompt":"a\xff"}',
    "utf16": '{"model":"M","prompt":"a"}'.encode("utf-16"),
    "utf16_no_bom": '{"model":"M","prompt":"a"}'.encode("utf-16-le"),
    "trailing": b'{"model":"M","prompt":"a"} x',
    "half_pair": rb'{"model":"M","prompt":"\ud83d"}',
    "single_quotes": b"{'model':'M'}",
}


@pytest.mark.parametrize("kind", list(BROKEN))
def test_broken_json(kind):
    with pytest.raises(InvalidRequestError) as caught:
        read_completion_request(BROKEN[kind])
    assert caught.value.status == 400
    assert not LEAK.search(caught.value.message)
    assert len(caught.value.message) < 200


def test_tolerable_json():
    assert read_completion_request(b'\xef\xbb\xbf{"model":"M","prompt":"a"}').prompts == ["a"]
    assert read_completion_request(b'{"model":"M","prompt":"a","n":1,"n":2}').num_choices == 2
    assert read_completion_request(rb'{"model":"M","prompt":"\ud83d\ude00"}').prompts == ["😀"]
