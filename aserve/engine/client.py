"""What a generation needs of an engine, and nothing else.

``LocalClient`` implements it within the process; a transport to an engine in another process can take its place.
All of it is called on the event loop; nothing of it awaits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from aserve.core.request import GenerationRequest, RequestId
from aserve.engine.mailbox import Mailbox


class EngineClient(Protocol):
    """The two verbs of a request's life, and a way to say the second from a finaliser."""

    def submit(self, request: GenerationRequest, mailbox: Mailbox) -> None:
        """Register the mailbox for every sequence of the request and have them run: all of them or none.

        Raises:
            InvalidRequestError, ContextLengthError: the request can never run here.
            QueueFullError: too many sequences wait already.
            EngineDrainingError, EngineDeadError: nothing is admitted any more.
        """
        ...

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget these sequences and cancel those that have not finished.

        Never raises, never waits, idempotent.
        """
        ...

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run something on the event loop soon; may be called from any thread, and from finalisers."""
        ...
