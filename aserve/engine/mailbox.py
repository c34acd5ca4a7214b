"""Where one user's request gets its events: a list and, while somebody waits, one event to wake the reader.

Filled on the event loop by the router, read by ``Generation``. Bounded by construction: a request has at most
``n * max_tokens`` events, so putting never waits and a slow reader costs ids, never a stalled batch. (A list and an
``anyio.Event`` cost half of an anyio memory object stream.)
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from aserve.core.errors import AserveError
from aserve.core.step import TokenEvent


class Mailbox:
    """Events of one request, and when they came (seconds of ``anyio.current_time()``)."""

    __slots__ = (
        "_events",
        "_make_event",
        "_num_gone",
        "_wakeup",
        "admitted_s",
        "error",
        "last_s",
        "num_registered",
        "on_admitted",
        "on_begun",
        "submitted_s",
    )

    def __init__(self) -> None:
        self._events: list[TokenEvent] = []
        self._num_gone = 0
        self._wakeup: anyio.Event | None = None
        self._make_event: Callable[[], anyio.Event] | None = None
        self.error: AserveError | None = None
        self.submitted_s = 0.0
        self.admitted_s: float | None = None
        self.last_s: float | None = None
        self.num_registered = 0
        """Sequences that may still put something: the router counts them."""
        self.on_admitted: Callable[[], None] | None = None
        self.on_begun: Callable[[], None] | None = None

    @property
    def num_events(self) -> int:
        """All that were ever put, read or not."""
        return self._num_gone + len(self._events)

    def admit(self, now_s: float) -> None:
        """Note that the first of the request's sequences has begun to run."""
        self.admitted_s = now_s
        if self.on_admitted is not None:
            self.on_admitted()
        if self.on_begun is not None:
            self.on_begun()

    def put(self, event: TokenEvent, now_s: float) -> None:
        """Append an event and wake the reader. Never waits, never raises."""
        self._events.append(event)
        self.last_s = now_s
        if self._wakeup is not None:
            self._wakeup.set()
            self._wakeup = None

    def close(self, error: AserveError) -> None:
        """End the reading with a reason; the first one counts. What has not been read is dropped."""
        if self.error is not None:
            return
        self.error = error
        self._num_gone += len(self._events)
        self._events.clear()
        if self._wakeup is not None:
            self._wakeup.set()
            self._wakeup = None

    async def take(self) -> list[TokenEvent]:
        """Wait until there is something, then return all of it. Raises the reason the mailbox was closed with.

        Nothing is lost when the waiting is cancelled: events leave the box only after the last await.
        """
        while True:
            if self.error is not None:
                raise self.error.with_traceback(None)
            if self._events:
                events, self._events = self._events, []
                self._num_gone += len(events)
                return events
            if self._wakeup is None:
                self._wakeup = self._new_event()
            await self._wakeup.wait()

    def _new_event(self) -> anyio.Event:
        """Remember the backend's own class: asking anyio for the backend each time costs more than the event."""
        if self._make_event is not None:
            return self._make_event()
        event = anyio.Event()
        self._make_event = type(event)
        return event
