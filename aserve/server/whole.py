"""The body of an answer that is not streamed: collects deltas, then builds the response object once."""

from __future__ import annotations

from typing import Any

import orjson

from aserve.core.request import TextDelta, TokenLogprobs
from aserve.server.logprobs import ChatLogprobs, CompletionLogprobs, TokenBytes
from aserve.server.prepare import Job
from aserve.server.usage import Usage


class WholeAnswer:
    """All choices of one request."""

    def __init__(self, job: Job, usage: Usage, token_bytes: TokenBytes) -> None:
        count = len(job.requests) * job.num_choices
        self._job = job
        self._usage = usage
        self._token_bytes = token_bytes
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        self._finish: list[str | None] = [None] * count

    def add(self, delta: TextDelta) -> None:
        if delta.text:
            self._texts[delta.choice].append(delta.text)
        if self._job.logprobs:
            self._logprobs[delta.choice] += delta.logprobs
        if delta.finish_reason is not None:
            self._finish[delta.choice] = delta.finish_reason.value

    def body(self) -> bytes:
        job = self._job
        build = self._chat_choice if job.chat else self._completion_choice
        return orjson.dumps(
            {
                "id": job.id,
                "object": "chat.completion" if job.chat else "text_completion",
                "created": job.created,
                "model": job.model,
                "choices": [build(index) for index in range(len(self._texts))],
                "usage": self._usage.report(),
            }
        )

    def _chat_choice(self, index: int) -> dict[str, Any]:
        logprobs = None
        if self._job.logprobs:
            content = ChatLogprobs(self._token_bytes).content(tuple(self._logprobs[index]))
            logprobs = {"content": content, "refusal": None}
        message = {"role": "assistant", "content": "".join(self._texts[index]), "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self._finish[index]}

    def _completion_choice(self, index: int) -> dict[str, Any]:
        logprobs = None
        if self._job.logprobs:
            logprobs = CompletionLogprobs(self._token_bytes).lists(tuple(self._logprobs[index]))
        return {
            "index": index,
            "text": "".join(self._texts[index]),
            "logprobs": logprobs,
            "finish_reason": self._finish[index],
        }
