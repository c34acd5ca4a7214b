"""What remains of a request when it is over: one line in the log and one count in the metrics.

Never keys, prompts or answers. Paths come from clients, so they are written escaped and cut. Lines of refusals, which
clients can cause at will, are bounded in number; the metrics count all of them.
"""

from __future__ import annotations

import logging

import anyio

from aserve.core.errors import AserveError
from aserve.server.asgi import RequestHead
from aserve.server.log import LIMITED
from aserve.server.request_counts import RequestCounts
from aserve.server.usage import Usage

logger = logging.getLogger("aserve.access")


class RequestRecord:
    """Notes the end of one request, once."""

    def __init__(self, head: RequestHead, route: str, counts: RequestCounts, *, level: int = logging.INFO) -> None:
        self._head = head
        self._route = route
        self._counts = counts
        self._level = level
        self._done = False
        self.started_s = anyio.current_time()
        self.usage: Usage | None = None
        self.answer_id: str | None = None

    @property
    def request_id(self) -> str:
        return self._head.request_id

    def close(self, status: int, outcome: str) -> None:
        """Note the outcome: to be called before the last send, which also ends the client's connection."""
        if self._done:
            return
        self._done = True
        seconds = anyio.current_time() - self.started_s
        self._counts.add(self._route, status, outcome)
        if logger.isEnabledFor(self._level):
            tokens = "" if self.usage is None else f" {self.usage.prompt_tokens}+{self.usage.completion_tokens} tokens"
            logger.log(
                self._level,
                "%s %s %d %s%s %.3fs id=%s",
                ascii(self._head.method[:20])[1:-1],
                ascii(self._head.path[:120])[1:-1],
                status,
                outcome,
                tokens,
                seconds,
                self._head.request_id,
                extra={LIMITED: f"{status} {outcome}"} if status >= 400 else None,
            )

    def close_with(self, error: AserveError) -> None:
        self.close(error.status, error.code or "error")
