"""What a generation needs of an engine, and nothing else.

``LocalClient`` implements it within the process; a transport to an engine in another process can take its place.
All of it is called on the event loop; nothing of it awaits but ``compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from aserve.core.grammar import Grammar
from aserve.core.request import GenerationRequest, RequestId
from aserve.engine.mailbox import Mailbox


class EngineClient(Protocol):
    """The two verbs of a request's life, what has to come before them, and a way to leave from a finaliser."""

    async def compile(self, grammar: Grammar) -> object:
        """Have a grammar ready for the step thread; it stays so for as long as the returned object is held.

        Raises:
            InvalidGrammarError, GrammarTimeoutError: it cannot be used.
            PromptError: by a fault of the server.
            UnsupportedFieldError: there are no grammars here.
        """
        ...

    def submit(self, unit: Sequence[tuple[GenerationRequest, Mailbox]]) -> None:
        """Register each mailbox for every sequence of its request and have them run: the whole unit or nothing.

        Raises:
            InvalidRequestError, ContextLengthError: a request, or the unit, can never run here.
            QueueFullError: too much waits already.
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
