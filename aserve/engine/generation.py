"""One user's request as a scope: n choices, one mailbox; the owner of cancellation.

Whatever ends a request early (its client, a deadline, a stop string in all choices, shutdown, the engine's death)
closes the mailbox or leaves the scope, and leaving is what cancels in the scheduler. Nothing on the way out awaits.
Knows the engine only as an ``EngineClient``. Used by the server's routes and by ``ChatStream``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from anyio.lowlevel import checkpoint_if_cancelled

from aserve.core.errors import (
    AserveError,
    DetokenizationError,
    EngineDeadError,
    GenerationClosedError,
    GenerationError,
    GrammarError,
    NoTokenLeftError,
)
from aserve.core.request import FinishReason, GenerationRequest, RequestId, TextDelta
from aserve.core.step import EXCLUDED_TOKEN, GRAMMAR_FAILED, TokenEvent
from aserve.engine.choice import Choice
from aserve.engine.client import EngineClient
from aserve.engine.mailbox import Mailbox
from aserve.engine.sequences import sequence_id
from aserve.engine.stats import Outcome, StatsRecorder
from aserve.text.detokenizer import Detokenizer
from aserve.text.stop_strings import StopMatcher

logger = logging.getLogger(__name__)

_ERROR = FinishReason.ERROR  # the look-up costs 0.2 us on CPython 3.11


class MakesDetokenizers(Protocol):
    """The part of a tokenizer that a generation needs."""

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer: ...


class Generation:
    """An async context manager and iterator; one reader at a time, ``close`` from any task.

    Request ids must not be used twice in an engine's life: events of the first could reach the second.
    """

    def __init__(
        self, request: GenerationRequest, *, client: EngineClient, tokenizer: MakesDetokenizers, recorder: StatsRecorder
    ) -> None:
        self.request = request
        self._client = client
        self._tokenizer = tokenizer
        self._recorder = recorder
        self._mailbox = Mailbox()
        self._choices: dict[RequestId, Choice] = {}
        self._num_open = request.n
        self._is_single = request.n == 1
        self._ready: list[TextDelta] = []
        self._compiled: object | None = None
        self._state = "new"

    # -- what it has come to -----------------------------------------------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated for all choices and read so far.

        The stop token that ends a choice counts, though no delta shows it; what follows a stop string does not.
        """
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that choice 0 found in the prefix cache; the other choices find choice 0's."""
        return next((choice.num_cached_tokens for choice in self._choices.values()), 0)

    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]:
        """By choice; None for one that has not ended."""
        return tuple(choice.finish_reason for choice in self._choices.values()) or (None,) * self.request.n

    @property
    def begun_s(self) -> float | None:
        """When the first choice began to run, by ``anyio.current_time()``; None while all wait."""
        return self._mailbox.admitted_s

    @property
    def last_token_s(self) -> float | None:
        """When the last token came, read or not; None before the first."""
        return self._mailbox.last_s

    @property
    def has_arrived(self) -> bool:
        """Whether every choice has ended and all its tokens are there, read or not."""
        return self._state != "new" and not self._mailbox.num_registered

    def when_begun(self, callback: Callable[[], None]) -> None:
        """Call this, and nothing given before, when the first choice begins to run."""
        self._mailbox.on_begun = callback

    @property
    def is_open(self) -> bool:
        """Entered and not left."""
        return self._state == "open"

    @property
    def error(self) -> AserveError | None:
        """What the request was closed with."""
        return self._mailbox.error

    # -- the scope ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Register and submit all choices, or none of them.

        A grammar that is not compiled yet is, before. Raises InvalidRequestError, ContextLengthError, QueueFullError,
        EngineDrainingError, EngineDeadError, PromptError.
        """
        await submit_together((self,), self._client)
        return self

    async def make_ready(self) -> None:
        """Have the grammar compiled, if there is one, and keep it so until the request is left. Raises as entering."""
        grammar = getattr(self.request.sampling, "grammar", None)  # what kind of value it is, submitting checks
        if grammar is not None:
            self._compiled = await self._client.compile(grammar)

    def offer(self) -> tuple[GenerationRequest, Mailbox]:
        """What is to be submitted, once."""
        if self._state != "new":
            raise RuntimeError("a generation can be entered once")
        return self.request, self._mailbox

    def open(self) -> None:
        """Begin, once it has been submitted."""
        request_id = self.request.request_id
        self._choices = {sequence_id(request_id, i): self._new_choice(i) for i in range(self.request.n)}
        self._state = "open"

    def abandon(self) -> None:
        """Take back what was submitted though not all of its unit could be opened. It counts as no request."""
        self._state = "left"
        self._release(sequence_id(self.request.request_id, i) for i in range(self.request.n))

    def _new_choice(self, index: int) -> Choice:
        request = self.request
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens)
        return Choice(index, detokenizer, StopMatcher(request.stop, request.include_stop) if request.stop else None)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()

    def close(self, error: AserveError) -> None:
        """Make ``next_deltas`` raise this, now and from now on; the first reason counts. From any task, idempotent.

        Cancels nothing by itself: the reader wakes up and leaves the scope.
        """
        self._mailbox.close(error)

    def leave(self) -> None:
        """Unregister, and cancel every choice that has not finished. What ``__aexit__`` does; idempotent."""
        if self._state != "open":
            return
        self._state = "left"
        self._compiled = None
        self._release(self._choices)
        if self._num_open:
            self._mailbox.close(GenerationClosedError("the request has been left"))
        self._note_outcome()

    def leave_soon(self) -> None:
        """``leave`` on the event loop, soon; for finalisers, which may run anywhere."""
        self._client.call_soon(self.leave)

    def _release(self, request_ids: Iterable[RequestId]) -> None:
        """The one way out for sequences, finished or not."""
        self._client.release(request_ids)

    # -- reading -----------------------------------------------------------------------------------------------------

    async def next_deltas(self) -> list[TextDelta]:
        """Wait for news, then return all there is: one delta per choice that has any, or [] after the last.

        Cancelling the wait loses nothing. Yields to the event loop only if it has to wait.

        Raises:
            GenerationError: a choice could not be computed; the request is over.
            EngineDeadError, EngineDrainingError: the engine failed, or was closed.
            AserveError: whatever ``close`` was called with.
        """
        if self._state == "new":
            raise RuntimeError("enter the generation before reading: async with generation: ...")
        if self._ready:
            ready, self._ready = self._ready, []
            return ready
        while self._num_open:
            deltas = self._decode(await self._mailbox.take())
            if deltas:
                return deltas
        return []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        if not self._ready:
            self._ready = await self.next_deltas()
            if not self._ready:
                raise StopAsyncIteration
        return self._ready.pop(0)

    def _decode(self, events: list[TokenEvent]) -> list[TextDelta]:
        groups = {events[0].request_id: events} if self._is_single else _by_sequence(events)
        deltas: list[TextDelta] = []
        for request_id, group in groups.items():
            choice = self._choices[request_id]  # open still: after its end nothing comes into the mailbox
            broken = group[-1].finish_reason is _ERROR
            reason = group.pop().token_id if broken else 0
            if group:
                delta = self._push(choice, group)
                if delta is None:
                    break
                deltas.append(delta)
            if choice.finish_reason is not None:  # by a stop string, too: then what follows it, an error even, is void
                self._num_open -= 1
                self._release((request_id,))
            elif broken:
                self.close(_failure(reason))
        return deltas

    def _push(self, choice: Choice, events: list[TokenEvent]) -> TextDelta | None:
        """The text of some tokens; None if a fault in making it has ended the request."""
        try:
            return choice.push(events)
        except BaseException as error:  # a panic in Rust is no Exception
            if isinstance(error, KeyboardInterrupt):  # whoever is interrupted here, it is the program
                raise
            logger.error("the tokens of %s cannot be turned into text", self.request.request_id, exc_info=error)
            self.close(DetokenizationError("this answer could not be written, by a fault of the server; others go on"))
            return None

    # -- numbers -----------------------------------------------------------------------------------------------------

    def _note_outcome(self) -> None:
        recorder, mailbox = self._recorder, self._mailbox
        reasons = self.finish_reasons
        outcome: Outcome
        if all(reasons):
            outcome = "length" if FinishReason.LENGTH in reasons else "stop"
            assert mailbox.last_s is not None, "it has had its last event"
            recorder.end_to_end.observe(mailbox.last_s - mailbox.submitted_s)
        elif isinstance(mailbox.error, GenerationError | EngineDeadError):
            outcome = "error"
        else:
            outcome = "cancelled"
        recorder.num_requests[outcome] += 1
        num_complete = sum(choice.num_tokens for choice in self._choices.values() if choice.finish_reason)
        recorder.num_cancelled_tokens += mailbox.num_events - num_complete


class Submittable(Protocol):
    """What can be submitted with others as one unit: a generation, or a prompt that is to become a vector."""

    async def make_ready(self) -> None:
        """Have what takes time and can go wrong behind it."""
        ...

    def offer(self) -> tuple[GenerationRequest, Mailbox]:
        """What is to be submitted, once."""
        ...

    def open(self) -> None:
        """Begin, once it has been submitted."""
        ...

    def abandon(self) -> None:
        """Take back what was submitted."""
        ...

    def leave(self) -> None:
        """Unregister, and cancel what has not finished."""
        ...


S = TypeVar("S", bound=Submittable)


class RequestGroup(Generic[S]):
    """Several requests, such as the prompts of one call, as one scope: all of them are admitted, or none."""

    def __init__(self, requests: Sequence[S], client: EngineClient) -> None:
        self._requests = tuple(requests)
        self._client = client

    async def __aenter__(self) -> tuple[S, ...]:
        """Submit all, in order, as one unit. Raises as entering a single generation does."""
        await submit_together(self._requests, self._client)
        return self._requests

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for request in self._requests:
            request.leave()


async def submit_together(requests: Sequence[Submittable], client: EngineClient) -> None:
    """Enter all of these new requests, or none of them."""
    for request in requests:
        await request.make_ready()
    await checkpoint_if_cancelled()  # before anything is registered: from here to the return nothing awaits
    client.submit([request.offer() for request in requests])  # first, since it checks the requests
    try:
        for request in requests:
            request.open()
    except BaseException:
        for request in requests:
            request.abandon()
        raise


def _failure(reason: int) -> GenerationError:
    """The error for a choice whose last event has this in place of a token id."""
    if reason == GRAMMAR_FAILED:
        return GrammarError("this answer's grammar cannot be followed any further, by a fault of the server")
    if reason == EXCLUDED_TOKEN:
        return NoTokenLeftError(
            "the grammar and the other constraints of this request exclude every token; the answer cannot be completed"
        )
    return GenerationError("the model's output is not a number; the answer cannot be completed")


def _by_sequence(events: list[TokenEvent]) -> dict[RequestId, list[TokenEvent]]:
    groups: dict[RequestId, list[TokenEvent]] = {}
    for event in events:
        groups.setdefault(event.request_id, []).append(event)
    return groups
