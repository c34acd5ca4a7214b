"""The deltas of a request's generations as one sequence: of one directly, of several through a shared mailbox.

Used by the generation routes; a request has several generations when it has several prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio

from aserve.core.errors import AserveError, GenerationClosedError
from aserve.core.request import TextDelta
from aserve.server.request_scope import RequestScope

if TYPE_CHECKING:
    from aserve.engine.generation import Generation


class DeltaSource(Protocol):
    async def next_deltas(self) -> list[TextDelta]:
        """Wait for news and return all of it; empty when every choice has finished. Raises AserveError."""
        ...


def source_of(generations: Sequence[Generation], num_choices: int, scope: RequestScope) -> DeltaSource:
    """The common source of entered generations; ``num_choices`` is the number of choices of each."""
    return generations[0] if len(generations) == 1 else _Merged(generations, num_choices, scope)


class _Merged:
    """One task per generation moves its deltas into a common list, with the choice's index over all prompts."""

    def __init__(self, generations: Sequence[Generation], num_choices: int, scope: RequestScope) -> None:
        self._ready: list[TextDelta] = []
        self._news = anyio.Event()
        self._num_open = len(generations)
        self._error: AserveError | None = None
        for index, generation in enumerate(generations):
            scope.start_soon(partial(self._pump, generation, index * num_choices))

    async def next_deltas(self) -> list[TextDelta]:
        while self._error is None and not self._ready and self._num_open:
            self._news = anyio.Event()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        ready, self._ready = self._ready, []
        return ready

    async def _pump(self, generation: Generation, first: int) -> None:
        try:
            while deltas := await generation.next_deltas():
                self._ready += [delta._replace(choice=first + delta.choice) for delta in deltas]
                self._news.set()
            self._num_open -= 1
        except AserveError as error:
            self._error = self._error or error
        except BaseException:  # cancelled from outside: the sender must not take this for a good end
            self._error = self._error or GenerationClosedError("the request was cancelled")
            raise
        finally:
            self._news.set()
