"""The time limits of one request: in all, until it begins to run, and between two tokens.

Owns what the headers and the server's defaults say, and when which limit passes. Closes nothing by itself: the request
scope, which runs it, gives it a way to. Knows generations by their times only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import anyio

from aserve.core.config import ServerConfig
from aserve.core.errors import (
    AserveError,
    DeadlineExceededError,
    IdleTimeoutError,
    InvalidRequestError,
    QueueTimeoutError,
)
from aserve.server.asgi import RequestHead

NEVER = math.inf
_SHORTEST_S = 0.001
"""No client can mean less, and the timers of an event loop are no finer."""


class Timed(Protocol):
    """What a generation tells of its progress, in seconds of ``anyio.current_time()``."""

    @property
    def begun_s(self) -> float | None:
        """When it first ran; None while it waits."""
        ...

    @property
    def last_token_s(self) -> float | None: ...

    @property
    def has_arrived(self) -> bool:
        """Whether all its tokens are there, read or not."""
        ...

    def when_begun(self, callback: Callable[[], None]) -> None:
        """Call this when it begins to run, which it has not yet."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Seconds; infinity is no limit.

    Attributes:
        total_s: from the request's head to its last token.
        queue_s: from its body's end until it begins to run.
        idle_s: of a running request, between two tokens, and before the first.
    """

    total_s: float = NEVER
    queue_s: float = NEVER
    idle_s: float = NEVER

    @classmethod
    def of(cls, server: ServerConfig, head: RequestHead) -> TimeLimits:
        """The server's limits, or the client's where those are shorter. Raises InvalidRequestError."""
        return cls(
            total_s=_shorter(server.request_timeout_s, head, "X-Request-Timeout"),
            queue_s=_shorter(server.queue_timeout_s, head, "X-Queue-Timeout"),
            idle_s=_shorter(server.idle_timeout_s, head, "X-Idle-Timeout"),
        )

    def exceeded(self) -> DeadlineExceededError:
        """What is said when all of the time has passed."""
        return DeadlineExceededError(f"the time limit of {self.total_s:g} s for this request has passed")


def _shorter(default_s: float | None, head: RequestHead, name: str) -> float:
    limit_s = NEVER if default_s is None else default_s
    asked = head.header(name.lower().encode())
    if asked is None:
        return limit_s
    try:
        asked_s = float(asked)
    except ValueError:
        asked_s = math.nan
    if not _SHORTEST_S <= asked_s < math.inf:
        raise InvalidRequestError(f"the header {name} must be a number of seconds, at least {_SHORTEST_S:g}")
    return min(limit_s, asked_s)


class Deadlines:
    """Watches one request's limits. Sleeps until one may have passed or a part begins: it never polls.

    Made when the request's body is there, from which time the queue counts.

    Args:
        started_s: when the request's head came.
        retry_after_s: what a client is told whose request never began.
    """

    def __init__(
        self, limits: TimeLimits, started_s: float, *, retry_after_s: Callable[[], float | None] = lambda: None
    ) -> None:
        self._limits = limits
        self._started_s = started_s
        self._queued_s = anyio.current_time()
        self._retry_after_s = retry_after_s
        self._timed: list[Timed] = []
        self._news = anyio.Event()
        self._when_begun: Callable[[], None] | None = None

    def when_begun(self, callback: Callable[[], None]) -> None:
        """Call this, once, when all parts run; at once if they do."""
        self._when_begun = callback
        self._wake()

    def watch(self, timed: Timed) -> None:
        """From now on this is a part of the request's work."""
        self._timed.append(timed)
        if timed.begun_s is None:
            timed.when_begun(self._wake)
        self._wake()

    async def run(self, close: Callable[[AserveError], None]) -> None:
        """Close the request with the limit that passes first; runs until cancelled, or until one has."""
        while True:
            self._news = anyio.Event()
            now_s = anyio.current_time()
            due_s, error = self._next()
            if due_s <= now_s:
                close(error)
                return
            with anyio.move_on_at(due_s):
                await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        if self._when_begun is not None and not self._waits:
            self._when_begun()
            self._when_begun = None

    @property
    def _waits(self) -> bool:
        return not self._timed or any(timed.begun_s is None for timed in self._timed)

    def _next(self) -> tuple[float, AserveError]:
        """What passes first, and when, if nothing changes."""
        limits = self._limits
        dues: list[tuple[float, AserveError]] = [(self._started_s + limits.total_s, limits.exceeded())]
        if self._waits:
            text = f"the request waited for {limits.queue_s:g} s without being begun, which is its limit"
            dues.append((self._queued_s + limits.queue_s, QueueTimeoutError(text, retry_after_s=self._retry_after_s())))
        silent_since_s = [since_s for timed in self._timed if (since_s := _silent_since_s(timed)) is not None]
        if silent_since_s:
            text = f"no token came for {limits.idle_s:g} s, which is this request's limit"
            dues.append((min(silent_since_s) + limits.idle_s, IdleTimeoutError(text)))
        return min(dues, key=lambda due: due[0])


def _silent_since_s(timed: Timed) -> float | None:
    """When it last gave a sign; None if it need not: it waits, or all of it has come."""
    if timed.begun_s is None or timed.has_arrived:
        return None
    return timed.begun_s if timed.last_token_s is None else timed.last_token_s
