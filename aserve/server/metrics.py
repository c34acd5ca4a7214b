"""``/metrics``: the numbers of engine and server in Prometheus' text form.

Every series is made from plain numbers at the moment of a scrape; nothing here is on the path of a token, and no
label is made of what clients send. Those that gateways know from vLLM appear under its names, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from aserve.core.capacity import Capacity
from aserve.engine.stats import EngineStats, HistogramStats
from aserve.planning.table import full_length_requests
from aserve.server.engine_slot import EngineSlot
from aserve.server.request_counts import RequestCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Read = Callable[[EngineStats], float]

# name after the prefix, vLLM's name (None: it has none), help, value
_GAUGES: tuple[tuple[str, str | None, str, Read], ...] = (
    ("num_requests_running", "num_requests_running", "Sequences in the batch.", lambda s: s.num_running),
    ("num_requests_waiting", "num_requests_waiting", "Sequences waiting for admission.", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "kv_cache_usage_perc",
        "Share of the KV cache in use, 0 to 1.",
        lambda s: s.num_used_blocks / s.num_blocks,
    ),
    ("kv_cache_blocks", None, "Blocks of the KV cache.", lambda s: s.num_blocks),
    (
        "last_step_age_seconds",
        None,
        "Since a step completed, or an engine without work was seen or given some.",
        lambda s: s.last_step_age_s,
    ),
)
# name after the prefix, help, value
_SIZES: tuple[tuple[str, str, Callable[[Capacity], float]], ...] = (
    ("kv_cache_tokens", "Tokens that the KV cache holds.", lambda c: c.num_kv_tokens),
    ("longest_request_tokens", "Longest prompt and answer together.", lambda c: c.max_length),
    ("full_length_requests", "Requests of that length that run in parallel.", full_length_requests),
    (
        "host_kv_cache_bytes",
        "Host memory for KV that left the cache.",
        lambda c: 0 if c.memory is None else c.memory.host_kv,
    ),
)
_COUNTERS: tuple[tuple[str, str | None, str, Read], ...] = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of all requests.", lambda s: s.num_prompt_tokens),
    ("generation_tokens", "generation_tokens", "Tokens generated.", lambda s: s.num_generated_tokens),
    (
        "cancelled_tokens",
        None,
        "Tokens generated that are in no complete answer: read, unread or late.",
        lambda s: s.num_cancelled_tokens,
    ),
    (
        "prefix_cache_queries",
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.num_prefix_queries,
    ),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.num_prefix_hits),
    ("host_cache_hits", None, "Admissions whose prefix was in part copied back.", lambda s: s.num_host_hits),
    ("host_cache_tokens", None, "Tokens of prefixes copied back from host memory.", lambda s: s.num_restored_tokens),
    (
        "preemptions",
        "num_preemptions",
        "Sequences that had to give up their KV cache and start again.",
        lambda s: s.num_preemptions,
    ),
    (
        "rejected_requests",
        "admission_rejections",
        "Requests refused because the queue was full.",
        lambda s: s.num_rejected,
    ),
    ("steps", None, "Steps completed.", lambda s: s.num_steps),
    ("step_thread_busy_seconds", None, "Time the step thread was not idle.", lambda s: s.busy_s),
    (
        "step_thread_wait_seconds",
        None,
        "Time the step thread waited for steps (on the CPU: computed them).",
        lambda s: s.wait_s,
    ),
)
_HISTOGRAMS: tuple[tuple[str, str, str, Callable[[EngineStats], HistogramStats]], ...] = (
    (
        "time_to_first_token_seconds",
        "time_to_first_token_seconds",
        "From submission to the first token.",
        lambda s: s.time_to_first_token_s,
    ),
    (
        "inter_token_latency_seconds",
        "inter_token_latency_seconds",
        "Between two steps that brought a request tokens, all its choices together.",
        lambda s: s.inter_token_s,
    ),
    (
        "queue_time_seconds",
        "request_queue_time_seconds",
        "From submission until the first choice ran.",
        lambda s: s.queue_s,
    ),
    (
        "request_latency_seconds",
        "e2e_request_latency_seconds",
        "From submission until the last choice had finished.",
        lambda s: s.end_to_end_s,
    ),
)


def render(slot: EngineSlot, counts: RequestCounts) -> bytes:
    """All series as text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(slot, counts))
    return generate_latest(registry)


class _Numbers(Collector):
    def __init__(self, slot: EngineSlot, counts: RequestCounts) -> None:
        self._slot = slot
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        yield from self._http()
        engine = self._slot.engine
        up = GaugeMetricFamily("aserve_engine_up", "1 while the engine serves, else 0.")
        up.add_metric([], float(engine is not None and engine.status in ("running", "draining")))
        yield up
        if engine is not None:
            yield from _engine_metrics(engine.stats(), engine.model_names[0])
            yield from _capacity_metrics(engine.capacity, engine.model_names[0])

    def _http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "aserve_http_requests", "Requests by route, status and outcome.", labels=["route", "status", "outcome"]
        )
        for (route, status, outcome), count in sorted(self._counts.totals.items()):
            requests.add_metric([route, str(status), outcome], count)
        yield requests
        active = GaugeMetricFamily("aserve_http_active_requests", "Requests to the generation routes in progress.")
        active.add_metric([], self._counts.num_active)
        yield active


def _engine_metrics(stats: EngineStats, model: str) -> Iterator[Metric]:
    def both(name: str, known_as: str | None) -> list[str]:
        return [f"aserve_{name}"] + ([] if known_as is None else [f"vllm:{known_as}"])

    for name, known_as, text, read in _GAUGES:
        for full in both(name, known_as):
            gauge = GaugeMetricFamily(full, text, labels=["model_name"])
            gauge.add_metric([model], read(stats))
            yield gauge
    for name, known_as, text, read in _COUNTERS:
        for full in both(name, known_as):
            counter = CounterMetricFamily(full, text, labels=["model_name"])
            counter.add_metric([model], read(stats))
            yield counter
    for name, known_as, text, histogram in _HISTOGRAMS:
        for full in both(name, known_as):
            yield _histogram(full, text, model, histogram(stats))
    for full in ("aserve_requests", "vllm:request_success"):
        ends = CounterMetricFamily(full, "Requests by how they ended.", labels=["model_name", "finished_reason"])
        for outcome, count in stats.num_requests.items():
            ends.add_metric([model, outcome], count)
        yield ends


def _capacity_metrics(capacity: Capacity, model: str) -> Iterator[Metric]:
    """The numbers of the table that the start prints."""
    for name, text, read in _SIZES:
        gauge = GaugeMetricFamily(f"aserve_{name}", text, labels=["model_name"])
        gauge.add_metric([model], read(capacity))
        yield gauge
    memory = capacity.memory
    if memory is None:
        return
    total = GaugeMetricFamily("aserve_memory_total_bytes", "Memory of the device.", labels=["model_name"])
    total.add_metric([model], memory.total)
    yield total
    parts = GaugeMetricFamily(
        "aserve_memory_bytes", "Where it goes, as the start found.", labels=["model_name", "kind"]
    )
    for kind in ("weights", "activations", "graphs", "kv_cache", "others", "unused"):
        parts.add_metric([model, kind], getattr(memory, kind))
    yield parts


def _histogram(name: str, text: str, model: str, values: HistogramStats) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["model_name"])
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*values.bounds, float("inf")], values.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
    family.add_metric([model], buckets=buckets, sum_value=values.total_s)
    return family
