"""Chat templates: which one is used, what a template that fails becomes, and the forms of messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aserve.core.errors import InvalidRequestError, ModelLoadError
from aserve.text.chat_template import ChatTemplate
from aserve.text.tokenizer import Tokenizer

Folder = Callable[..., Path]
USER = {"role": "user", "content": "hi"}
CONTENTS = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
ITEMS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}>{% endfor %}{% endfor %}"
)
TOJSON = ITEMS.replace(
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}", " {{ c.function.arguments | tojson }}"
)
CONCATENATED = ITEMS.replace(
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}", "{{ ' ' + c.function.arguments }}"
)
PRINTED = CONCATENATED.replace("' ' + c.", "c.")
PARTS = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def template(text: str | dict[str, str]) -> ChatTemplate:
    return ChatTemplate(text, {"bos_token": "<s>"})


def history(arguments: Any = "{}", **assistant: Any) -> list[dict[str, Any]]:
    function = {"name": "f"} if arguments is None else {"name": "f", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return [
        USER,
        {"role": "assistant", "tool_calls": [call], **assistant},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]


def refused(text: str, messages: list[Any], **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        template(text).render(messages, **options)
    assert "\n" not in caught.value.message
    return caught.value


def test_a_template_that_raises_speaks_to_the_client() -> None:
    raising = "{% if messages[0].role == 'system' %}{{ raise_exception('system turns not supported') }}{% endif %}ok"
    error = refused(raising, [{"role": "system", "content": "x"}])
    assert error.param == "messages"
    assert "system turns not supported" in error.message
    assert template(raising).render([USER]) == "ok"


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages[0].nothing.more }}",
        "{{ 1 / (messages | length - 1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ [].pop() }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ undefined_function() }}",
    ],
)
def test_a_template_that_fails_is_the_requests_fault(text: str) -> None:
    assert refused(text, [USER]).param == "messages"


@pytest.mark.parametrize(
    ("text", "message"),
    [("{% for m in messages %}", "line 1"), ("\n\n{{ 'a' }", "line 3"), ("{% if true %}{{ x | nothing }}{% fi %}", "")],
)
def test_a_template_that_cannot_be_compiled_is_the_models_fault(text: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=f"the chat template has an error in .*{message}"):
        template(text)


def test_content_that_is_absent_renders_as_nothing() -> None:
    shown = {template(CONTENTS).render(history(**fields)) for fields in ({}, {"content": None}, {"content": ""})}
    assert shown == {"[user:hi][assistant:][tool:1]"}


def test_text_parts_are_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    assert template(CONTENTS).render([{"role": "user", "content": parts}]) == "[user:a\n b]"


def test_a_template_that_reads_parts_gets_parts() -> None:
    shown = template(PARTS).render(
        [USER, {"role": "assistant", "content": None}, {"role": "user", "content": [{"type": "text", "text": "!"}]}]
    )
    assert shown == "hi!"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"v": 1, "w": "x"}', "hi<f v=1 w=x>1"),
        ({"v": 1}, "hi<f v=1>1"),
        ("", "hi<f>1"),
        ("  ", "hi<f>1"),
        ("{}", "hi<f>1"),
        (None, "hi<f>1"),
    ],
)
def test_arguments_become_a_mapping(arguments: Any, shown: str) -> None:
    assert template(ITEMS).render(history(arguments)) == shown


@pytest.mark.parametrize("arguments", ['{"v": ', "[]", "null", "42", '"x"', 7])
def test_arguments_that_are_no_object_are_passed_on_or_refused(arguments: Any) -> None:
    assert refused(ITEMS, history(arguments)).param == "messages"
    assert json.dumps(arguments) in template(TOJSON).render(history(arguments))


@pytest.mark.parametrize("text", [TOJSON, CONCATENATED, PRINTED])
def test_arguments_are_json_in_the_prompt_whatever_the_template_expects(text: str) -> None:
    for arguments in ('{"v": "é"}', {"v": "é"}):
        assert template(text).render(history(arguments)) == 'hi<f {"v": "é"}>1'.replace(
            "f ", "f" + " " * (text != PRINTED)
        )


def test_messages_are_not_modified() -> None:
    messages = history('{"v": 1}', content=None)
    before = json.dumps(messages)
    template(ITEMS).render(messages)
    assert json.dumps(messages) == before


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    developer = [{"role": "developer", "content": "x"}]
    assert template(CONTENTS).render(developer) == "[system:x]"
    assert template("{# developer #}" + CONTENTS).render(developer) == "[developer:x]"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [None],
        [[USER]],
        ["hi"],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "tool_calls": 3}],
        [{"role": "assistant", "tool_calls": [3]}],
        [{"role": "assistant", "tool_calls": [{"function": "f"}]}],
    ],
)
def test_malformed_messages(messages: list[Any]) -> None:
    assert refused(CONTENTS, messages).param == "messages"


def test_deep_nesting_is_refused() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    refused("{{ tools | tojson }}", [USER], tools=[deep])


def test_options_reach_the_template() -> None:
    shown = template("{{ thinking }}{{ bos_token }}{{ tools | length }}").render(
        [USER], tools=[{"type": "function"}], thinking="yes"
    )
    assert shown == "yes<s>1"
    assert refused("x", [USER], chat_template="y").param == "chat_template_kwargs"
    assert (
        template("{{ name }}").render([USER], name="any name that is not reserved") == "any name that is not reserved"
    )


def test_named_templates() -> None:
    named = template({"default": "plain", "tool_use": "tools"})
    assert named.render([USER]) == named.render([USER], tools=[]) == "plain"
    assert named.render([USER], tools=[{"type": "function"}]) == "tools"
    with pytest.raises(ModelLoadError, match=r"\(rag, tool_use\).*--chat-template"):
        template({"rag": "", "tool_use": ""})


def test_where_a_template_comes_from(folder: Folder, tmp_path: Path) -> None:
    def prompt(path: Path, **options: Any) -> str:
        loaded = Tokenizer.load(path, **options).chat_template
        assert loaded is not None
        return loaded.render([USER])

    path = folder(settings={"chat_template": "config"})
    assert prompt(path) == "config"
    named = [{"name": "default", "template": "list"}, {"name": "rag", "template": "other"}]
    assert prompt(folder(settings={"chat_template": named})) == "list"
    (path / "chat_template.jinja").write_text("file")
    assert prompt(path) == "file"
    (tmp_path / "own.jinja").write_text("{{ 'own' }}")
    assert prompt(path, chat_template=str(tmp_path / "own.jinja")) == "own"
    assert prompt(path, chat_template="{{ 'literal' }}") == "literal"
    with pytest.raises(ModelLoadError, match=r"nowhere\.jinja cannot be read"):
        prompt(path, chat_template="nowhere.jinja")
