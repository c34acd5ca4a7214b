"""The engine client within the process: admission, the routes of the router, and the command queue.

All bookkeeping of who is registered goes through here. ``release`` is the only place that sends ``Cancel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio

from aserve.core.capacity import Capacity
from aserve.core.errors import InvalidRequestError, QueueFullError
from aserve.core.request import GenerationRequest, RequestId
from aserve.engine.admission import max_sequences, num_too_many, validate
from aserve.engine.bridge import CommandQueue, EventRouter
from aserve.engine.lifecycle import Lifecycle
from aserve.engine.mailbox import Mailbox
from aserve.engine.messages import Cancel, Submit
from aserve.engine.sequences import expand
from aserve.engine.stats import StatsRecorder


class LocalClient:
    """Implements ``EngineClient`` for an engine whose step thread runs in this process."""

    def __init__(
        self,
        *,
        commands: CommandQueue,
        router: EventRouter,
        lifecycle: Lifecycle,
        recorder: StatsRecorder,
        capacity: Capacity,
        vocab_size: int,
        max_queue: int,
    ) -> None:
        self._commands = commands
        self._router = router
        self._lifecycle = lifecycle
        self._recorder = recorder
        self._capacity = capacity
        self._vocab_size = vocab_size
        self._max_queue = max_queue
        self.max_sequences = max_sequences(capacity, max_queue)
        # Requests that come and go within one step leave commands and no registration: this bounds those.
        self._max_commands = 2 * self.max_sequences
        self._num_arrivals = 0

    def submit(self, request: GenerationRequest, mailbox: Mailbox) -> None:
        self._lifecycle.refuse_unless_running()
        validate(request, self._capacity, self._vocab_size, self._max_queue)
        self._refuse_if_full(request)
        sequences = expand(request, self._num_arrivals)
        if any(self._router.is_registered(sequence.request_id) for sequence in sequences):
            raise InvalidRequestError(f"a request with the id {request.request_id!r} is running already")
        self._num_arrivals += len(sequences)
        mailbox.submitted_s = anyio.current_time()
        if self.is_idle:
            self._router.progress_s = mailbox.submitted_s
        for sequence in sequences:
            self._router.register(sequence.request_id, mailbox)
        self._commands.put(Submit(sequences))
        self._recorder.num_prompt_tokens += len(request.prompt_token_ids)

    def release(self, request_ids: Iterable[RequestId]) -> None:
        unfinished = tuple(i for i in request_ids if self._router.unregister(i))
        if unfinished:
            self._commands.put(Cancel(unfinished))

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._router.call_soon(callback)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is registered and the scheduler, with every command applied, has nothing left either."""
        if self._router.num_unfinished:
            return False
        report = self._router.report
        if self._lifecycle.failure is not None or report is None or self._router.is_closed:
            return True
        return report.is_empty and report.num_commands == self._commands.num_put

    def _refuse_if_full(self, request: GenerationRequest) -> None:
        report = self._router.report
        assert report is not None, "the thread reports before it says that it has loaded"
        num_unfinished = self._router.num_unfinished
        excess = num_too_many(
            report.scheduler,
            self._capacity,
            max_queue=self._max_queue,
            num_unfinished=num_unfinished,
            num_new=request.n,
            num_prompt_tokens=len(request.prompt_token_ids),
        )
        num_undone = self._commands.num_put - report.num_commands
        if excess > 0 or num_undone >= self._max_commands:
            self._recorder.num_rejected += 1
            num_ahead = max(1, num_unfinished - report.scheduler.num_running)
            raise QueueFullError(
                f"{self._max_queue} requests wait already, which is the limit; try again later",
                retry_after_s=self._recorder.retry_after_s(num_ahead, anyio.current_time()),
            )
