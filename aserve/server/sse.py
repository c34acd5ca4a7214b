"""Server-sent events of a streamed answer, from byte templates built once per request.

Only texts, log-probabilities and running usage are encoded per chunk; no dictionary is built and nothing is
validated on the way of a token. Text is written as ASCII with escapes: some clients split event lines at U+2028 and
U+0085 too. Called by the request scope.
"""

from __future__ import annotations

from json.encoder import encode_basestring_ascii as quote
from typing import Any, Protocol

import orjson

from aserve.core.errors import AserveError
from aserve.core.request import TextDelta
from aserve.server.logprobs import ChatLogprobs, CompletionLogprobs, TokenBytes
from aserve.server.prepare import Job
from aserve.server.reply import error_object
from aserve.server.usage import Usage

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def error_event(error: AserveError) -> bytes:
    """The last event of a stream that fails after its headers were sent."""
    return b"data: " + orjson.dumps(error_object(error)) + b"\n\n"


class Frames(Protocol):
    """Encodes the deltas of one request."""

    def delta(self, delta: TextDelta) -> bytes:
        """Zero or more events for one delta, its finish included."""
        ...

    def end(self) -> bytes:
        """What follows the last choice's finish: the usage, if asked for, and the closing marker."""
        ...


def _head(job: Job, kind: str) -> str:
    return f'data: {{"id":{quote(job.id)},"object":"{kind}","created":{job.created},"model":{quote(job.model)},'


class _Ending:
    """What closes a chunk (``}`` and perhaps the usage) and what closes the stream."""

    def __init__(self, job: Job, usage: Usage, head: str) -> None:
        self._usage = usage
        self._running = job.continuous_usage
        self._include = job.include_usage
        self._fixed = b',"usage":null}\n\n' if job.include_usage else b"}\n\n"
        self._head = head.encode()

    def chunk(self) -> bytes:
        if self._running:
            return b',"usage":' + orjson.dumps(self._usage.report()) + b"}\n\n"
        return self._fixed

    def stream(self) -> bytes:
        if not self._include:
            return DONE
        return self._head + b'"choices":[],"usage":' + orjson.dumps(self._usage.report()) + b"}\n\n" + DONE


class ChatFrames:
    """``chat.completion.chunk`` events: the role, then contents, then one finish for each choice."""

    def __init__(self, job: Job, usage: Usage, token_bytes: TokenBytes) -> None:
        head = _head(job, "chat.completion.chunk")
        self._ending = _Ending(job, usage, head)
        count = len(job.requests) * job.num_choices
        self._open = [f'{head}"choices":[{{"index":{i},"delta":'.encode() for i in range(count)]
        self._begun = [False] * count
        self._logprobs = ChatLogprobs(token_bytes) if job.logprobs else None

    def delta(self, delta: TextDelta) -> bytes:
        choice, text = delta.choice, delta.text
        opening, closing = self._open[choice], self._ending.chunk()
        out = b""
        if not self._begun[choice]:
            self._begun[choice] = True
            out = opening + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' + closing
        if self._logprobs is not None and delta.logprobs:
            logprobs = orjson.dumps({"content": self._logprobs.content(delta.logprobs), "refusal": None})
            out += (
                opening
                + b'{"content":'
                + quote(text).encode()
                + b'},"logprobs":'
                + logprobs
                + b',"finish_reason":null}]'
                + closing
            )
        elif text:
            out += (
                opening + b'{"content":' + quote(text).encode() + b'},"logprobs":null,"finish_reason":null}]' + closing
            )
        if delta.finish_reason is not None:
            out += (
                opening
                + b'{},"logprobs":null,"finish_reason":"'
                + delta.finish_reason.value.encode()
                + b'"}]'
                + closing
            )
        return out

    def end(self) -> bytes:
        return self._ending.stream()


class CompletionFrames:
    """``text_completion`` events: texts, then one finish for each choice."""

    def __init__(self, job: Job, usage: Usage, token_bytes: TokenBytes) -> None:
        head = _head(job, "text_completion")
        self._ending = _Ending(job, usage, head)
        count = len(job.requests) * job.num_choices
        self._open = [f'{head}"choices":[{{"index":{i},"text":'.encode() for i in range(count)]
        self._logprobs = [CompletionLogprobs(token_bytes) for _ in range(count)] if job.logprobs else None

    def delta(self, delta: TextDelta) -> bytes:
        opening, closing = self._open[delta.choice], self._ending.chunk()
        out = b""
        if self._logprobs is not None and delta.logprobs:
            lists: Any = self._logprobs[delta.choice].lists(delta.logprobs)
            out = (
                opening
                + quote(delta.text).encode()
                + b',"logprobs":'
                + orjson.dumps(lists)
                + b',"finish_reason":null}]'
                + closing
            )
        elif delta.text:
            out = opening + quote(delta.text).encode() + b',"logprobs":null,"finish_reason":null}]' + closing
        if delta.finish_reason is not None:
            out += (
                opening
                + b'"","logprobs":null,"finish_reason":"'
                + delta.finish_reason.value.encode()
                + b'"}]'
                + closing
            )
        return out

    def end(self) -> bytes:
        return self._ending.stream()
