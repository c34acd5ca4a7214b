"""The answer to ``Engine.chat`` and ``Engine.complete``: an iterator of text deltas that can also be a scope.

Starts with the first use, ends with the scope, the last delta, or any exception. A loop that is left early ends it
too: the stream is then unreachable, and its finaliser releases the request on the next turn of the event loop. That
needs no await, which is why it is allowed here; ``async with`` says the same at once and under every interpreter.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aserve.core.request import FinishReason, TextDelta
from aserve.engine.generation import Generation


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice, whole."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


class ChatStream:
    """``async for delta in stream``, or ``async with stream``, or ``await stream.collect()``."""

    def __init__(self, make_generation: Callable[[], Awaitable[Generation]]) -> None:
        """``make_generation`` encodes the prompt; it is called once, by the first use."""
        self._make_generation: Callable[[], Awaitable[Generation]] | None = make_generation
        self._generation: Generation | None = None
        self._in_scope = False

    @property
    def generation(self) -> Generation:
        """The request behind the stream, for token counts and ``close``. There is none before the first use."""
        if self._generation is None:
            raise RuntimeError("the stream has not been started")
        return self._generation

    async def __aenter__(self) -> Self:
        """Encode and submit. Raises as ``Generation.__aenter__`` and ``Engine.encode`` do."""
        await self._start()
        self._in_scope = True
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.generation.leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        """The next news of any choice; its text may be empty while a stop string or character is incomplete."""
        if self._generation is None:
            await self._start()
        generation = self.generation
        try:
            return await generation.__anext__()
        except BaseException:  # the end of the iteration is one of them
            if not self._in_scope:
                generation.leave()
            raise

    async def collect(self) -> tuple[Completion, ...]:
        """Read everything that is left; returns the choices in order. Raises RuntimeError if all was read before."""
        texts: dict[int, list[TextDelta]] = {}
        async for delta in self:
            texts.setdefault(delta.choice, []).append(delta)
        if not texts:  # every choice has a last delta, so somebody has read it
            raise RuntimeError("the stream has been read to its end")
        return tuple(
            Completion(
                "".join(delta.text for delta in deltas),
                tuple(token_id for delta in deltas for token_id in delta.token_ids),
                deltas[-1].finish_reason or FinishReason.STOP,
            )
            for _, deltas in sorted(texts.items())
        )

    async def _start(self) -> None:
        if self._make_generation is None:
            raise RuntimeError("a stream can be started once")
        make_generation, self._make_generation = self._make_generation, None
        generation = await make_generation()
        await generation.__aenter__()
        self._generation = generation

    def __del__(self) -> None:
        if self._generation is not None and self._generation.is_open:
            self._generation.leave_soon()
