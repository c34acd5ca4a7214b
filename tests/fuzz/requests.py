"""Any bytes as a request's body: an answer of the schema, or an error that is the client's and names no internals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import atheris

from aserve.core.errors import AserveError
from aserve.server.chat_schema import ChatRequest, read_chat_request
from aserve.server.completion_schema import CompletionRequest, read_completion_request
from aserve.server.offered import NOT_OFFERED, WITHOUT_EFFECT
from aserve.server.reply import error_reply
from aserve.text.messages import TemplateFormat, normalise

_USER = {"role": "user", "content": "hi"}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
_FIELDS: dict[str, Any] = {
    "model": "M",
    "max_tokens": 5,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0,
    "n": 2,
    "seed": -1,
    "stop": ["a", "b"],
    "logit_bias": {"5": -1.5},
    "stop_token_ids": [1],
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "cache_salt": "s",
    "metadata": {},
    "response_format": {"type": "text"},
    "tools": [],
}
SEEDS: list[Any] = [
    {**_FIELDS, "messages": [_USER], "logprobs": True, "top_logprobs": 3, "chat_template_kwargs": {"x": 1}},
    {**_FIELDS, "messages": [_USER, {"role": "assistant", "tool_calls": [_CALL]}, {"role": "tool", "content": "1"}]},
    {"model": "M", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {**_FIELDS, "prompt": ["a", "b"], "best_of": 2, "logprobs": 1, "add_special_tokens": False},
    {"model": "M", "prompt": [[1, 2], [3]]},
    {"model": "M", "prompt": [1, 2, 3], "echo": False},
    b"\xef\xbb\xbf{}",
    b'{"model":"\\ud800"}',
]
_FORMS = [TemplateFormat(), TemplateFormat(content_parts=True, arguments_as_text=True, developer_role=True)]


_NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *NOT_OFFERED, *WITHOUT_EFFECT, "best_of"})
_INNER = ["role", "content", "type", "text", "refusal", "tool_calls", "function", "name", "arguments", "include_usage"]
_TEXTS = ["user", "assistant", "tool", "text", "refusal", "function", "a", "", "5", "{}", '{"a": 1}', "M", "none"]
_DEPTH = 4


def check(data: bytes) -> None:
    """The bytes as a body, and a body of real fields and odd values that the bytes choose."""
    for body in (data, _built(data)):
        for read in (read_chat_request, read_completion_request):
            _check(read, body)


def _check(read: Callable[[bytes], ChatRequest | CompletionRequest], body: bytes) -> None:
    refusal: AserveError | None = None
    try:
        request = read(body)
    except AserveError as error:
        refusal = error
    else:
        (_check_chat if isinstance(request, ChatRequest) else _check_completion)(request)
    if refusal is not None:
        assert refusal.status == 400, refusal
        assert "Traceback" not in refusal.message
        assert "aserve." not in refusal.message
        error_reply(refusal)


def _built(data: bytes) -> bytes:
    given = atheris.FuzzedDataProvider(data)
    body = {"model": "M", "messages": [_USER], "prompt": "a"}
    del body[given.PickValueInList(["messages", "prompt"])]
    for _ in range(given.ConsumeIntInRange(0, 6)):
        body[given.PickValueInList(_NAMES)] = _value(given, 0)
    return json.dumps(body).encode()


def _value(given: Any, depth: int) -> Any:
    match given.ConsumeIntInRange(0, 7 if depth < _DEPTH else 5):
        case 0:
            return None
        case 1:
            return given.ConsumeBool()
        case 2:
            return given.ConsumeIntInRange(-3, 130)
        case 3:
            return given.ConsumeInt(9)
        case 4:
            return given.ConsumeFloat()
        case 5:
            return given.PickValueInList(_TEXTS) if given.ConsumeBool() else given.ConsumeUnicode(8)
        case 6:
            return [_value(given, depth + 1) for _ in range(given.ConsumeIntInRange(0, 4))]
    count = given.ConsumeIntInRange(0, 4)
    return {given.PickValueInList(_INNER): _value(given, depth + 1) for _ in range(count)}


def _check_chat(request: ChatRequest) -> None:
    turns = [message.for_template() for message in request.messages]
    for form in _FORMS:
        prepared = normalise(turns, form)
        assert len(prepared) == len(turns)
    assert request.token_limit is None or request.token_limit >= 1
    assert 1 <= request.num_choices <= 128


def _check_completion(request: CompletionRequest) -> None:
    assert request.prompts
    assert all(isinstance(prompt, str) or all(type(i) is int for i in prompt) for prompt in request.prompts)
    assert len(request.prompts) * request.num_choices <= 1024
