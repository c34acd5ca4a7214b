"""One prompt that becomes a vector, as a scope: the counterpart of ``Generation``, with one event in its mailbox.

The same rules hold: whatever ends it early closes the mailbox or leaves the scope, and leaving is what cancels in the
scheduler. Knows the engine only as an ``EngineClient``. Used by ``Engine.embed`` and by the server's pooling routes.
"""

from __future__ import annotations

from collections.abc import Callable

from aserve.core.errors import AserveError, EngineDeadError, GenerationClosedError, GenerationError
from aserve.core.request import FinishReason, GenerationRequest
from aserve.engine.client import EngineClient
from aserve.engine.mailbox import Mailbox
from aserve.engine.sequences import sequence_id
from aserve.engine.stats import Outcome, StatsRecorder


class PooledPrompt:
    """Entered with others as a unit, by ``RequestGroup``. Request ids must not be used twice in an engine's life."""

    def __init__(self, request: GenerationRequest, *, client: EngineClient, recorder: StatsRecorder) -> None:
        assert request.pooling is not None, "a request without pooling is a generation"
        self.request = request
        self._client = client
        self._recorder = recorder
        self._mailbox = Mailbox()
        self._state = "new"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def begun_s(self) -> float | None:
        """When it began to run, by ``anyio.current_time()``; None while it waits."""
        return self._mailbox.admitted_s

    @property
    def last_token_s(self) -> float | None:
        """When the vector came, read or not; None before."""
        return self._mailbox.last_s

    @property
    def has_arrived(self) -> bool:
        """Whether the vector is there, read or not."""
        return self._state != "new" and not self._mailbox.num_registered

    def when_begun(self, callback: Callable[[], None]) -> None:
        """Call this, and nothing given before, when it begins to run."""
        self._mailbox.on_begun = callback

    async def make_ready(self) -> None:
        """Nothing: it has no grammar."""

    def offer(self) -> tuple[GenerationRequest, Mailbox]:
        """What is to be submitted, once."""
        if self._state != "new":
            raise RuntimeError("a pooled prompt can be entered once")
        return self.request, self._mailbox

    def open(self) -> None:
        """Begin, once it has been submitted."""
        self._state = "open"

    def abandon(self) -> None:
        """Take back what was submitted though not all of its unit could be opened. It counts as no request."""
        self._state = "left"
        self._client.release((sequence_id(self.request.request_id, 0),))

    def close(self, error: AserveError) -> None:
        """Make ``vector`` raise this; the first reason counts. From any task, idempotent."""
        self._mailbox.close(error)

    def leave(self) -> None:
        """Unregister, and cancel unless it has finished. Idempotent."""
        if self._state != "open":
            return
        self._state = "left"
        self._client.release((sequence_id(self.request.request_id, 0),))
        self._note_outcome()
        self._mailbox.close(GenerationClosedError("the request has been left"))

    async def vector(self) -> bytes:
        """Wait for the vector, once: float32, little-endian.

        Raises:
            GenerationError: it could not be computed.
            EngineDeadError, EngineDrainingError: the engine failed, or was closed.
            AserveError: whatever ``close`` was called with.
        """
        (event,) = await self._mailbox.take()
        if event.finish_reason is FinishReason.ERROR:
            self.close(GenerationError("the model's output is not a number; there is no vector of this input"))
            return await self.vector()
        assert event.vector is not None, "an executor that has no vector says so"
        return event.vector

    def _note_outcome(self) -> None:
        recorder, mailbox = self._recorder, self._mailbox
        outcome: Outcome = "cancelled"
        if isinstance(mailbox.error, GenerationError | EngineDeadError):
            outcome = "error"
        elif mailbox.error is None and mailbox.last_s is not None:
            outcome = "stop"
            recorder.end_to_end.observe(mailbox.last_s - mailbox.submitted_s)
        recorder.num_requests[outcome] += 1
