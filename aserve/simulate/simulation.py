"""The loop: arrivals, plans and commits of a real scheduler, on a clock that a cost model moves.

Keeps as many steps in flight as the capacity allows, as the step loop of the engine does: with two, planning is hidden
behind the device's work. A request that is added while a step computes waits for the next plan.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from aserve.core.request import Request, RequestId, SamplingParams
from aserve.core.step import StepPlan, StepResult, TokenEvent
from aserve.scheduler import Scheduler, SchedulerStats
from aserve.simulate.cost import CostModel
from aserve.simulate.timeline import Timeline
from aserve.simulate.trace import TraceRequest

_SAMPLED = 1
_FILLER = 0
_FIRST_NAME = 16
"""Token ids from here name a request or a prefix group; those below are the same in all."""


@dataclass(slots=True)
class Times:
    """When things happened to one request, in seconds from the start; -1 for not at all."""

    arrival_s: float
    admitted_s: float = -1.0
    first_token_s: float = -1.0
    last_token_s: float = -1.0
    num_tokens: int = 0


@dataclass(slots=True)
class Outcome:
    """Everything that happened.

    Attributes:
        times: of each request, in the order of the trace.
        gaps_s: between any two tokens of one request that follow each other, all requests together.
        end_s: when the last token came.
        busy_s: how long the device computed.
    """

    times: list[Times]
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    timeline: Timeline = field(default_factory=Timeline)
    num_steps: int = 0
    end_s: float = 0.0
    busy_s: float = 0.0
    peak_waiting: int = 0
    stats: SchedulerStats | None = None


class Simulation:
    """One run of one trace."""

    def __init__(self, scheduler: Scheduler, cost: CostModel, trace: Sequence[TraceRequest]) -> None:
        self._scheduler = scheduler
        self._cost = cost
        self._trace = trace
        self._max_in_flight = scheduler.capacity.max_in_flight
        self._outcome = Outcome([Times(request.arrival_s) for request in trace])
        self._in_flight: deque[tuple[StepPlan, float]] = deque()  # with the time at which it is done
        self._groups: dict[str, int] = {}
        self._next_arrival = 0
        self._now_s = 0.0
        self._device_free_s = 0.0

    def run(self) -> Outcome:
        """Play the trace to its end."""
        while True:
            self._arrive()
            self._fill()
            if self._in_flight:
                self._finish_step()
            elif self._next_arrival < len(self._trace):
                self._now_s = self._trace[self._next_arrival].arrival_s
            else:
                break
        assert not self._scheduler.has_work, "S7: there is work, nothing in flight, and no plan"
        self._outcome.end_s = self._now_s
        self._outcome.stats = self._scheduler.stats()
        return self._outcome

    def _arrive(self) -> None:
        trace = self._trace
        while self._next_arrival < len(trace) and trace[self._next_arrival].arrival_s <= self._now_s:
            index = self._next_arrival
            self._next_arrival += 1
            self._scheduler.add(self._request(index, trace[index]))

    def _fill(self) -> None:
        while len(self._in_flight) < self._max_in_flight:
            plan = self._scheduler.plan()
            if plan is None:
                return
            self._now_s += self._cost.host_ms * 1e-3
            start_s = max(self._now_s, self._device_free_s)
            device_s = self._cost.device_s(plan, self._scheduler.capacity.windows)
            self._device_free_s = start_s + device_s
            self._outcome.busy_s += device_s
            self._in_flight.append((plan, self._device_free_s))
            for row in plan.sequences:
                if row.new is not None:
                    times = self._outcome.times[int(row.request_id)]
                    if times.admitted_s < 0:
                        times.admitted_s = start_s

    def _finish_step(self) -> None:
        plan, done_s = self._in_flight.popleft()
        self._now_s = max(self._now_s, done_s)
        sampled = (_SAMPLED,) * sum(row.samples for row in plan.sequences)
        for event in self._scheduler.commit(StepResult(plan.step_id, sampled)):
            self._note_token(event)
        outcome = self._outcome
        outcome.num_steps += 1
        stats = self._scheduler.stats()
        outcome.peak_waiting = max(outcome.peak_waiting, stats.num_waiting)
        outcome.timeline.add(
            self._now_s, stats.num_running, stats.num_waiting, stats.num_used_blocks / stats.num_blocks
        )

    def _note_token(self, event: TokenEvent) -> None:
        times = self._outcome.times[int(event.request_id)]
        times.num_tokens += 1
        if times.first_token_s < 0:
            times.first_token_s = self._now_s
        else:
            self._outcome.gaps_s.append(self._now_s - times.last_token_s)
        times.last_token_s = self._now_s

    def _request(self, index: int, request: TraceRequest) -> Request:
        """The request as the scheduler sees it.

        Prefix hashes are chained, so one token that names the request, or its group, sets all blocks behind it apart;
        the rest is filler that all requests share, which costs no memory but the references.
        """
        own = request.prompt_tokens - request.prefix_tokens
        prompt: tuple[int, ...] = ()
        if request.prefix is not None and request.prefix_tokens:
            group = self._groups.setdefault(request.prefix, len(self._groups))
            prompt = (_FIRST_NAME + 2 * group, *(_FILLER,) * (request.prefix_tokens - 1))
        if own:
            prompt += (_FIRST_NAME + 2 * index + 1, *(_FILLER,) * (own - 1))
        return Request(
            request_id=RequestId(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=request.output_tokens),
            priority=request.priority,
            arrival_index=index,
        )
