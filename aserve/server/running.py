"""The requests in progress, for those who want to end one from outside.

A request is known by the id in its ``x-request-id`` header, the client's own or made up, and by the id of its answer.
Whoever ends it has to be its caller: the same API key, or none on either side.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aserve.core.errors import RequestAbortedError
from aserve.server.auth import Caller
from aserve.server.record import RequestRecord

if TYPE_CHECKING:
    from aserve.server.request_scope import RequestScope


class RunningRequests:
    """Written by the routes, each for the time of its requests."""

    def __init__(self) -> None:
        self._running: dict[RequestRecord, tuple[Caller, RequestScope]] = {}

    @contextmanager
    def running(self, record: RequestRecord, caller: Caller, scope: RequestScope) -> Generator[None]:
        """A request, from now on until its answer is complete."""
        self._running[record] = caller, scope
        try:
            yield
        finally:
            del self._running[record]

    def abort(self, request_id: str, caller: Caller) -> int:
        """End this caller's requests of this id, of which clients may have made several; returns how many."""
        found = [
            scope
            for record, (owner, scope) in self._running.items()
            if owner is caller and scope.error is None and request_id in (record.request_id, record.answer_id)
        ]
        for scope in found:
            scope.close(RequestAbortedError("the request was aborted on demand"))
        return len(found)
