"""The in-process transport between the event loop and the step thread; the one module that knows threads.

``StepHost`` is where a step loop runs and how the two sides reach each other: ``ThreadHost``, a thread, in every
program; tests have one in which both sides take turns in virtual time.

Commands go down through a queue that never blocks the loop. Reports come up in batches with one wake-up of the loop
per step, never per token (measured: 20 to 40 us of the thread's time per step of 64 sequences, where a call per token
takes 2 ms). Knows nothing of scheduling or text. Used by ``run_engine`` and the local client.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import anyio
from anyio.lowlevel import current_token
from sniffio import current_async_library_cvar

from aserve.core.errors import AserveError, EngineDeadError
from aserve.core.request import RequestId
from aserve.core.step import POOLED
from aserve.engine.lifecycle import ENGINE_DEAD
from aserve.engine.mailbox import Mailbox
from aserve.engine.messages import Command, Failed, LifeSign, Message, StepReport
from aserve.engine.stats import StatsRecorder

logger = logging.getLogger(__name__)


class CommandQueue:
    """Loop to thread. How much may be put is the local client's decision; putting never blocks and never raises."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Command] = SimpleQueue()  # in C, and safe to call from a signal handler
        self.num_put = 0

    def put(self, command: Command) -> None:
        """Called on the loop."""
        self.num_put += 1
        self._commands.put(command)

    def take(self, *, block: bool) -> list[Command]:
        """Return everything there is; with ``block``, sleep until there is something. Called on the thread."""
        commands = [self._commands.get()] if block else []
        while not self._commands.empty():  # nobody else takes
            commands.append(self._commands.get_nowait())
        return commands


CallSoon = Callable[[Callable[[], object]], object]


def native_call_soon() -> CallSoon:
    """The running loop's own way to be called from another thread."""
    token: Any = current_token().native_token
    if hasattr(token, "run_sync_soon"):
        return token.run_sync_soon
    # asyncio would run the callback in the calling thread's context, in which anyio knows no event loop; nor does it in
    # a copy of ours if the host runs plain asyncio: there a loop is known by its current task, and a callback has none
    context = copy_context()
    context.run(current_async_library_cvar.set, "asyncio")
    return partial(token.call_soon_threadsafe, context=context)


class EventRouter:
    """Thread to loop: carries messages over and puts each token event into the mailbox that is registered for it.

    ``publish`` belongs to the thread, everything else to the loop. Events for an id that is not registered come late,
    after their request has left; they are dropped and counted.
    """

    def __init__(
        self,
        recorder: StatsRecorder,
        on_life_sign: Callable[[LifeSign], None],
        on_fault: Callable[[], None],
        call_soon: CallSoon | None = None,
    ) -> None:
        """``on_fault`` is called, once, if reports cannot be delivered: what makes them is to stop.

        ``call_soon`` runs something on the loop from any thread, and raises RuntimeError when the loop is gone; by
        default it is the running loop's own.
        """
        self._call_soon = call_soon or native_call_soon()
        self._recorder = recorder
        self._on_life_sign = on_life_sign
        self._on_fault = on_fault
        self._is_faulty = False
        self._messages: deque[Message] = deque()
        self._armed = False
        self.is_closed = False
        self._routes: dict[RequestId, Mailbox] = {}
        self._after_report: anyio.Event | None = None
        self.report: StepReport | None = None
        self.progress_s = anyio.current_time()
        """When a step last completed, the scheduler was last seen empty, or work last came to an idle engine."""

    # -- on the thread -----------------------------------------------------------------------------------------------

    def publish(self, message: Message) -> None:
        """Hand a message to the loop. Never waits and never raises, not even when the loop is gone."""
        if self.is_closed:
            return
        self._messages.append(message)
        if not self._armed:
            self._armed = True
            self.call_soon(self._deliver)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run something on the loop soon, from any thread or finaliser; dropped when the loop is gone."""
        try:
            self._call_soon(callback)
        except RuntimeError:  # trio.RunFinishedError is one, too
            self.is_closed = True
            self._messages.clear()

    # -- on the loop -------------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Sequences that are registered and have not had their last event."""
        return len(self._routes)

    def is_registered(self, request_id: RequestId) -> bool:
        return request_id in self._routes

    def register(self, request_id: RequestId, mailbox: Mailbox) -> None:
        self._routes[request_id] = mailbox
        mailbox.num_registered += 1

    def unregister(self, request_id: RequestId) -> Mailbox | None:
        """Forget a sequence; returns its mailbox if it had not finished. Idempotent."""
        mailbox = self._routes.pop(request_id, None)
        if mailbox is not None:
            mailbox.num_registered -= 1
        return mailbox

    def close_mailboxes(self, make_error: Callable[[], AserveError]) -> None:
        """Close every registered mailbox, each once; they stay registered until their readers have left."""
        for mailbox in dict.fromkeys(self._routes.values()):  # n choices share one
            mailbox.close(make_error())

    def close_all(self, make_error: Callable[[], AserveError]) -> None:
        """Close every registered mailbox and forget them all; for when nothing runs any more."""
        self.close_mailboxes(make_error)
        self._routes.clear()
        self._wake_waiters()

    def close(self) -> None:
        """Deliver nothing any more."""
        self.is_closed = True
        self._messages.clear()
        self._wake_waiters()

    async def wait_report(self) -> None:
        """Wait until the next report has been delivered, every mailbox closed, or the router itself."""
        if self._after_report is None:
            self._after_report = anyio.Event()
        await self._after_report.wait()

    def _wake_waiters(self) -> None:
        if self._after_report is not None:
            self._after_report.set()
            self._after_report = None

    def _deliver(self) -> None:
        self._armed = False  # before looking: whatever is appended from here on arms again
        while self._messages:
            message = self._messages.popleft()
            if isinstance(message, StepReport):
                if not self._is_faulty:
                    self._deliver_report(message)
                continue
            self._receive(message)

    def _deliver_report(self, report: StepReport) -> None:
        try:
            self._route(report)
        except Exception as error:  # a fault of ours: without this every request would wait for ever
            logger.exception("tokens cannot be delivered; no request can be served any more")
            self._is_faulty = True
            self._receive(Failed(error))
            self._on_fault()

    def _receive(self, sign: LifeSign) -> None:
        self._on_life_sign(sign)
        if isinstance(sign, Failed):
            self.close_all(lambda: EngineDeadError(ENGINE_DEAD))

    def _route(self, report: StepReport) -> None:
        now_s = anyio.current_time()
        routes = self._routes
        num_late = num_finished = num_vectors = 0
        gaps: dict[float, int] = {}  # sequences by the time of their last token: one or two entries
        for request_id in report.admitted:
            mailbox = routes.get(request_id)
            if mailbox is not None and mailbox.admitted_s is None:
                mailbox.admit(now_s)
                self._recorder.queue.observe(now_s - mailbox.submitted_s)
        for event in report.events:
            request_id = event.request_id
            mailbox = routes.get(request_id)
            if mailbox is None:
                num_late += 1
                continue
            if event.finish_reason is not None:
                del routes[request_id]
                mailbox.num_registered -= 1
                num_finished += 1
                num_vectors += event.token_id == POOLED
            last_s = mailbox.last_s
            if last_s is None and event.token_id != POOLED:
                self._recorder.time_to_first_token.observe(now_s - mailbox.submitted_s)
            elif last_s is not None and last_s != now_s:
                gaps[last_s] = gaps.get(last_s, 0) + 1
            mailbox.put(event, now_s)
        for last_s, num_tokens in gaps.items():
            self._recorder.inter_token.observe(now_s - last_s, num_tokens)
        if self.report is None or report.num_steps != self.report.num_steps or report.is_empty:
            self.progress_s = now_s
        self.report = report
        self._recorder.note_events(len(report.events) - num_vectors, num_late, num_finished, now_s)
        self._wake_waiters()


EXIT_JOIN_S = 3.0
"""A signal while a model loads must end the process within seconds, so it is not waited for longer than this."""


class StepThread:
    """The thread of the step loop.

    Daemonic: one that hangs in a driver call cannot keep the process alive. But one that is merely still loading is
    waited for when the interpreter exits: a thread that is stopped inside native code there aborts the process
    ("terminate called without an active exception").
    """

    def __init__(self, target: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=target, name="aserve-steps", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self._thread.join, EXIT_JOIN_S)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread, at most this long; True if it has ended."""
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended:
            atexit.unregister(self._thread.join)
        return ended


class StepHost(Protocol):
    """Where a step loop runs. Made within the event loop, used by ``run_engine``.

    Attributes:
        commands: the loop's way to the step loop.
    """

    commands: CommandQueue

    def call_soon(self, callback: Callable[[], object], /) -> object:
        """The step loop's way back, see ``EventRouter``."""
        ...

    def clock(self) -> float:
        """Seconds, for measuring how busy the step loop is."""
        ...

    def start(self, moves: Iterator[object]) -> None:
        """Run these moves to their end, one after the other."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the moves, at most this long; True if they have ended."""
        ...


class ThreadHost:
    """Runs a step loop in a thread of its own."""

    def __init__(self) -> None:
        self.commands = CommandQueue()
        self.call_soon = native_call_soon()
        self.clock = time.perf_counter
        self._thread: StepThread | None = None

    def start(self, moves: Iterator[object]) -> None:
        self._thread = StepThread(partial(deque[object], moves, 0))  # which iterates in C and keeps nothing
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        return self._thread is None or self._thread.join(timeout_s)
