"""The engine client within the process: admission, the routes of the router, and the command queue.

All bookkeeping of who is registered goes through here. ``release`` is the only place that sends ``Cancel``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import anyio

from aserve.core.capacity import Capacity
from aserve.core.errors import InvalidRequestError, QueueFullError
from aserve.core.grammar import Grammar
from aserve.core.request import GenerationRequest, Request, RequestId
from aserve.engine.admission import FreePlaces, QueueLimits, check_unit, num_too_many, validate
from aserve.engine.bridge import CommandQueue, EventRouter
from aserve.engine.grammars import Grammars
from aserve.engine.lifecycle import Lifecycle
from aserve.engine.mailbox import Mailbox
from aserve.engine.messages import Cancel, StepReport, Submit
from aserve.engine.place_forecast import PlaceForecast
from aserve.engine.sequences import expand
from aserve.engine.stats import StatsRecorder
from aserve.engine.waiting import WaitingPrompts


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
        limits: QueueLimits,
        grammars: Grammars,
    ) -> None:
        self._commands = commands
        self._router = router
        self._lifecycle = lifecycle
        self._recorder = recorder
        self._capacity = capacity
        self._vocab_size = vocab_size
        self._limits = limits
        self._grammars = grammars
        self._waiting = WaitingPrompts()
        self._forecast = PlaceForecast()
        self.max_sequences = limits.max_sequences(capacity)
        # Requests that come and go within one step leave commands and no registration: this bounds those.
        self._max_commands = 2 * self.max_sequences
        self._num_arrivals = 0
        self._num_preparing = 0

    async def compile(self, grammar: Grammar) -> object:
        self._lifecycle.refuse_unless_running()
        return await self._grammars.compile(grammar)

    def submit(self, unit: Sequence[tuple[GenerationRequest, Mailbox]]) -> None:
        self._lifecycle.refuse_unless_running()
        for request, _ in unit:
            validate(request, self._capacity, self._vocab_size)
        num_new = sum(request.n for request, _ in unit)
        check_unit(num_new, self.max_sequences)
        lengths = [len(request.prompt_token_ids) for request, _ in unit]
        self._refuse_if_full(
            num_new,
            num_unfinished=self._router.num_unfinished,
            num_prompt_tokens=sum(lengths),
            longest_prompt=max(lengths),
        )
        now_s = anyio.current_time()
        if self.is_idle:
            self._router.progress_s = now_s
            self._recorder.drain_rate.begin(now_s)
        sequences = self._register(unit, now_s)
        self._commands.put(Submit(tuple(sequences)))
        self._recorder.num_prompt_tokens += sum(lengths)

    def release(self, request_ids: Iterable[RequestId]) -> None:
        unfinished: list[RequestId] = []
        for request_id in request_ids:
            mailbox = self._router.unregister(request_id)
            if mailbox is not None:
                unfinished.append(request_id)
                self._waiting.leave(mailbox)
        if unfinished:
            self._commands.put(Cancel(tuple(unfinished)))

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._router.call_soon(callback)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of requests that have not begun to run."""
        return self._waiting.num_tokens

    @property
    def is_idle(self) -> bool:
        """Whether nothing is registered and the scheduler, with every command applied, has nothing left either."""
        if self._router.num_unfinished:
            return False
        report = self._router.report
        if self._lifecycle.failure is not None or report is None or self._router.is_closed:
            return True
        return report.is_empty and report.num_commands == self._commands.num_put

    @contextmanager
    def preparing(self, num_new: int) -> Generator[None]:
        """Count so many sequences as waiting while their prompts are made. Raises QueueFullError, counting a refusal.

        Admission decides again, once the prompts are known.
        """
        self._refuse_if_full(num_new, num_unfinished=self._router.num_unfinished + self._num_preparing)
        self._num_preparing += num_new
        try:
            yield
        finally:
            self._num_preparing -= num_new

    def _refuse_if_full(
        self, num_new: int, *, num_unfinished: int, num_prompt_tokens: int = 1, longest_prompt: int = 1
    ) -> None:
        """Raise QueueFullError if so many new sequences could not be taken now. Counts a refusal.

        An engine that takes nothing any more says that instead: its queue will not drain, so nobody is to come back.
        """
        self._lifecycle.refuse_unless_running()
        report = self._router.report
        assert report is not None, "the thread reports before it says that it has loaded"
        limits = self._limits
        num_waiting = num_too_many(
            report.scheduler,
            self._capacity,
            max_queue=0,
            num_unfinished=num_unfinished,
            num_new=num_new,
            num_prompt_tokens=longest_prompt,
        )
        num_undone = self._commands.num_put - report.num_commands
        if num_waiting > limits.max_sequences_waiting or num_undone >= self._max_commands:
            text = f"{limits.max_sequences_waiting} requests wait already, which is the limit"
        elif num_waiting_tokens := self._num_tokens_too_many(report, num_prompt_tokens):
            text = (
                f"{num_waiting_tokens} prompt tokens wait already, and with {num_prompt_tokens} more they would be "
                f"above the limit of {limits.max_tokens_waiting}"
            )
        elif wait_s := self._wait_s_too_long(report, num_new, num_waiting):
            text = f"this would wait for about {wait_s:.1f} s, and the limit is {limits.max_wait_s:g} s"
        else:
            return
        self._recorder.num_rejected += 1
        raise QueueFullError(f"{text}; try again later", retry_after_s=self.retry_after_s())

    def _num_tokens_too_many(self, report: StepReport, num_prompt_tokens: int) -> int:
        """The prompt tokens that wait, if so many more cannot wait with them; else 0."""
        most = self._limits.max_tokens_waiting
        if self._waiting.num_tokens + num_prompt_tokens <= most:
            return 0
        free = FreePlaces.of(report.scheduler, self._capacity)
        num_waiting = self._waiting.num_tokens_beyond(free, self._capacity)
        if not num_waiting or num_waiting + num_prompt_tokens <= most:
            return 0
        return num_waiting

    def _wait_s_too_long(self, report: StepReport, num_new: int, num_waiting: int) -> float:
        """The seconds that so many new sequences would wait, if that is too long; else 0."""
        most_s = self._limits.max_wait_s
        if most_s is None or num_waiting <= 0:
            return 0.0
        stats = report.scheduler
        wait_s = self._forecast.wait_s(
            report,
            num_places=stats.num_running if stats.num_waiting else self._capacity.max_num_seqs,
            num_new=num_new,
            num_unknown=self._num_preparing,
        )
        return wait_s if wait_s > most_s else 0.0

    def retry_after_s(self) -> float:
        """When as many sequences as wait now will have ended, at the measured rate."""
        report = self._router.report
        num_running = 0 if report is None else report.scheduler.num_running
        num_ahead = max(1, self._router.num_unfinished + self._num_preparing - num_running)
        return self._recorder.drain_rate.wait_s(num_ahead, anyio.current_time())

    def _register(self, unit: Sequence[tuple[GenerationRequest, Mailbox]], now_s: float) -> list[Request]:
        """Expand all requests and, once it is sure that every id is new, register their mailboxes."""
        expanded: list[tuple[tuple[Request, ...], Mailbox]] = []
        ids: set[RequestId] = set()
        num_arrivals = self._num_arrivals
        for request, mailbox in unit:
            sequences = expand(request, num_arrivals)
            num_arrivals += len(sequences)
            expanded.append((sequences, mailbox))
            for sequence in sequences:
                if sequence.request_id in ids or self._router.is_registered(sequence.request_id):
                    raise InvalidRequestError(f"a request with the id {request.request_id!r} is running already")
                ids.add(sequence.request_id)
        self._num_arrivals = num_arrivals
        for sequences, mailbox in expanded:
            mailbox.submitted_s = now_s
            self._waiting.enter(mailbox, len(sequences[0].prompt_token_ids), len(sequences))
            self._forecast.enter(
                mailbox,
                num_choices=len(sequences),
                max_tokens=sequences[0].sampling.max_tokens,
                num_unfinished=self._router.num_unfinished,
            )
            for sequence in sequences:
                self._router.register(sequence.request_id, mailbox)
        return [sequence for sequences, _ in expanded for sequence in sequences]
