"""The figures of a run, and runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from aserve.core.errors import ConfigError
from aserve.simulate.simulation import Outcome
from aserve.simulate.trace import TraceRequest

_PARTS = ("mean", "p50", "p90", "p99", "max")


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all values do not exceed (nearest rank); 0 of none."""
    if not ordered:
        return 0.0
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds: the mean, three percentiles and the most."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        mean = sum(ordered) / len(ordered) if ordered else 0.0
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(mean, p50, p90, p99, ordered[-1] if ordered else 0.0)


@dataclass(frozen=True, slots=True)
class Report:
    """One run.

    Attributes:
        ttft_s: arrival to first token.
        itl_s: one token to the next, over all tokens of all requests.
        queue_s: arrival to the start of the first step that computes for the request.
        slowdown: arrival to first token, over the same if the request had come alone.
        prefix_hit_rate: share of prompt tokens that came from the prefix cache.
        busy: share of the time in which the device computed.
    """

    ttft_s: Spread
    itl_s: Spread
    queue_s: Spread
    slowdown: Spread
    num_requests: int
    duration_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    num_steps: int
    num_preemptions: int
    prefix_hit_rate: float
    peak_waiting: int
    peak_kv_use: float
    busy: float

    @classmethod
    def of(cls, outcome: Outcome, trace: Sequence[TraceRequest], alone_s: Sequence[float]) -> Report:
        """The figures of an outcome. ``alone_s`` is each request's time to first token if it had come alone."""
        stats = outcome.stats
        assert stats is not None, "a report is made of a run that has ended"
        duration_s = outcome.end_s - trace[0].arrival_s
        return cls(
            ttft_s=Spread.of([t.first_token_s - t.arrival_s for t in outcome.times]),
            itl_s=Spread.of(outcome.gaps_s),
            queue_s=Spread.of([t.admitted_s - t.arrival_s for t in outcome.times]),
            slowdown=Spread.of(
                [(t.first_token_s - t.arrival_s) / a for t, a in zip(outcome.times, alone_s, strict=True)]
            ),
            num_requests=len(trace),
            duration_s=duration_s,
            output_tokens_per_s=sum(t.num_tokens for t in outcome.times) / duration_s,
            prompt_tokens_per_s=sum(r.prompt_tokens for r in trace) / duration_s,
            num_steps=outcome.num_steps,
            num_preemptions=stats.num_preemptions,
            prefix_hit_rate=stats.num_prefix_hits / max(1, stats.num_prefix_queries),
            peak_waiting=outcome.peak_waiting,
            peak_kv_use=max(outcome.timeline.kv_use),
            busy=outcome.busy_s / duration_s,
        )

    def as_dict(self) -> dict[str, object]:
        """The figures for JSON."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for people."""
        spreads = (("TTFT", self.ttft_s), ("ITL", self.itl_s), ("queue", self.queue_s))
        rows = [(f"{name} {part}", _time(getattr(spread, part))) for name, spread in spreads for part in _PARTS]
        return [
            *rows,
            *((f"slowdown {part}", f"{getattr(self.slowdown, part):.1f}") for part in _PARTS),
            ("output tok/s", f"{self.output_tokens_per_s:.1f}"),
            ("prompt tok/s", f"{self.prompt_tokens_per_s:.1f}"),
            ("requests", str(self.num_requests)),
            ("duration", _time(self.duration_s)),
            ("steps", str(self.num_steps)),
            ("device busy", f"{self.busy:.0%}"),
            ("preemptions", str(self.num_preemptions)),
            ("prefix hits", f"{self.prefix_hit_rate:.1%}"),
            ("most waiting", str(self.peak_waiting)),
            ("most KV use", f"{self.peak_kv_use:.0%}"),
        ]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def table(reports: Mapping[str, Report]) -> str:
    """Runs side by side, a column each, under the names given."""
    if not reports:
        raise ConfigError("there is nothing to compare")
    names = [name for name, _ in next(iter(reports.values())).rows()]
    heads = [title.split() for title in reports]
    height = max(map(len, heads))  # of several settings, each has a line of its own
    columns = [
        [*head, *[""] * (height - len(head)), *[value for _, value in report.rows()]]
        for head, report in zip(heads, reports.values(), strict=True)
    ]
    widths = [max(map(len, column)) for column in columns]
    left = max(map(len, names))
    lines: list[str] = []
    for index, name in enumerate([*[""] * height, *names]):
        cells = "  ".join(f"{column[index]:>{width}}" for column, width in zip(columns, widths, strict=True))
        lines.append(f"{name:{left}}  {cells}")
    return "\n".join(lines)
