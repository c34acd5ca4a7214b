"""What the engine counts: requests, tokens, latencies; plain numbers, cheap enough to keep always.

``StatsRecorder`` is written on the event loop, by the router once per step and by generations once per request.
``EngineStats`` is the frozen picture that ``Engine.stats()`` returns and that the server turns into metrics; nothing
here knows their wire format.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from aserve.engine.drain_rate import DrainRate

Outcome = Literal["stop", "length", "error", "cancelled"]
"""How a user's request ended: ``length`` if any choice ran into its limit, ``cancelled`` if it left before its end."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histograms' buckets; a last bucket takes the rest."""


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """``counts[i]`` values were in ``(bounds[i - 1], bounds[i]]`` seconds; the last count has no upper bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total_s: float

    @property
    def num_values(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts of durations by bucket."""

    __slots__ = ("_bounds", "_counts", "_total_s")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total_s = 0.0

    def observe(self, value_s: float, count: int = 1) -> None:
        """Add a duration, ``count`` times."""
        self._counts[bisect_left(self._bounds, value_s)] += count
        self._total_s += value_s * count

    def snapshot(self) -> HistogramStats:
        return HistogramStats(self._bounds, tuple(self._counts), self._total_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine's numbers at one moment. Counters count since the start.

    Attributes:
        num_running: sequences in the batch.
        num_waiting: sequences that are submitted and not running.
        num_used_blocks: KV blocks in use, of ``num_blocks``.
        num_requests: users' requests by outcome.
        num_rejected: requests refused because the queue was full.
        num_prompt_tokens: of all requests that were submitted, each prompt once.
        num_generated_tokens: all that the executor sampled, those nobody read included.
        num_cancelled_tokens: those of no complete answer: generated for choices that were left, closed or failed
            before their end was read, or after a stop string; whether they were read, unread or came late.
        num_late_events: the part of them that came after their choice had left.
        num_prefix_queries: prompt tokens looked up in the prefix cache, ``num_prefix_hits`` of them found.
        num_host_hits: admissions for which host memory had a part of the prefix, ``num_restored_tokens`` of it.
        busy_s: seconds the step thread was not asleep.
        wait_s: the part of them spent waiting for steps (on the CPU: computing them).
        last_step_age_s: seconds since a step completed, or an engine without work was seen or given some.
        time_to_first_token_s: from submission to the first token.
        inter_token_s: between two steps that brought a request tokens, all its choices together.
        queue_s: from submission until the first choice ran.
        end_to_end_s: from submission until the last choice had finished.
    """

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    num_requests: dict[Outcome, int]
    num_rejected: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cancelled_tokens: int
    num_late_events: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_host_hits: int
    num_restored_tokens: int
    num_preemptions: int
    num_steps: int
    busy_s: float
    wait_s: float
    last_step_age_s: float
    time_to_first_token_s: HistogramStats
    inter_token_s: HistogramStats
    queue_s: HistogramStats
    end_to_end_s: HistogramStats


class StatsRecorder:
    """Counts on the event loop."""

    def __init__(self) -> None:
        self.num_requests: dict[Outcome, int] = {"stop": 0, "length": 0, "error": 0, "cancelled": 0}
        self.num_rejected = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_cancelled_tokens = 0
        self.num_late_events = 0
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        self.queue = Histogram()
        self.end_to_end = Histogram()
        self.drain_rate = DrainRate()

    def note_events(self, num_events: int, num_late: int, num_finished: int, now_s: float) -> None:
        """Count one report's events."""
        self.num_generated_tokens += num_events
        self.num_late_events += num_late
        self.num_cancelled_tokens += num_late
        if num_finished:
            self.drain_rate.note(num_finished, now_s)
