"""The clock and the figures: what a step costs, when tokens come, what is counted."""

from __future__ import annotations

import pytest

from aserve.core.config import CacheConfig, SchedulerConfig
from aserve.core.errors import ConfigError
from aserve.simulate import CostModel, MachineConfig, Setup, TraceConfig, TraceRequest, simulate
from aserve.simulate.report import Spread, percentile
from aserve.simulate.timeline import Timeline, plot
from aserve.simulate.trace import random_trace

COSTS = {
    "host_ms": 2.0,
    "step_ms": 10.0,
    "prefill_token_us": 100.0,
    "decode_row_us": 1000.0,
    "kv_token_ns": 0.0,
    "attention_pair_ns": 0.0,
}


def setup(*, max_in_flight: int = 1, kv_cache_tokens: int = 4096, **settings) -> Setup:
    return Setup(
        machine=MachineConfig(**COSTS),
        cache=CacheConfig(kv_cache_tokens=kv_cache_tokens, block_size=16),
        scheduler=SchedulerConfig(max_in_flight=max_in_flight, max_batch_tokens=256, max_num_seqs=8, **settings),
    )


@pytest.mark.parametrize(
    ("depth", "first_s", "gap_s"),
    [
        (1, 2 * (2e-3 + 10e-3) + 300 * 100e-6, 2e-3 + 10e-3 + 1e-3),  # two chunks; planning is added to each step
        (2, 2e-3 + 2 * 10e-3 + 300 * 100e-6, 10e-3 + 1e-3),  # planning is hidden, but for the first step's
    ],
)
def test_a_request_alone_takes_what_the_cost_model_says(depth, first_s, gap_s) -> None:
    report, outcome = simulate(setup(max_in_flight=depth), [TraceRequest(1.0, 300, 5)])
    assert report.ttft_s.max == pytest.approx(first_s)
    assert report.itl_s.p50 == report.itl_s.max == pytest.approx(gap_s)
    assert report.queue_s.max == pytest.approx(2e-3)
    assert outcome.times[0].num_tokens == 5
    assert report.num_steps == 6
    assert report.duration_s == pytest.approx(first_s + 4 * gap_s)


def test_alone_nobody_is_slowed_down() -> None:
    report, _ = simulate(setup(), [TraceRequest(0.0, 700, 2), TraceRequest(100.0, 50, 2)])
    assert report.slowdown.p50 == pytest.approx(1.0)
    assert report.slowdown.max == pytest.approx(1.0)


def test_attention_costs_what_a_window_leaves() -> None:
    cost = CostModel(kv_token_ns=1000.0, attention_pair_ns=10.0)
    assert cost.step_s([(999, 1)]) == pytest.approx(1000e-6)
    assert cost.step_s([(999, 1)], (None, 99)) == pytest.approx((1000e-6 + 100e-6) / 2)
    assert cost.step_s([(1000, 100)]) == pytest.approx(1100e-6 + 100 * 1050.5 * 10e-9)


def test_requests_wait_for_a_slot() -> None:
    report, _ = simulate(setup(), [TraceRequest(0.0, 16, 50) for _ in range(9)])
    assert report.peak_waiting == 1
    assert report.queue_s.max > 50 * 10e-3 > report.queue_s.p50


def test_a_prefix_group_shares_its_beginning_and_nothing_else() -> None:
    trace = [
        TraceRequest(0.0, 100, 1, "a", 64),
        TraceRequest(10.0, 100, 1, "a", 64),
        TraceRequest(20.0, 100, 1, "b", 64),
        TraceRequest(30.0, 100, 1),
    ]
    report, _ = simulate(setup(), trace)
    assert report.prefix_hit_rate == pytest.approx(64 / 400)
    off, _ = simulate(
        Setup(machine=MachineConfig(**COSTS), cache=CacheConfig(kv_cache_tokens=4096, prefix_cache=False)), trace
    )
    assert off.prefix_hit_rate == 0


def test_a_full_cache_preempts() -> None:
    report, _ = simulate(setup(kv_cache_tokens=256), [TraceRequest(0.0, 16, 200) for _ in range(4)])
    assert report.num_preemptions > 0
    assert report.peak_kv_use == 1.0


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="300 tokens and the KV cache holds 256"):
        simulate(setup(kv_cache_tokens=256), [TraceRequest(0.0, 200, 100)])


def test_the_same_seed_gives_the_same_figures() -> None:
    def figures(seed: int) -> dict[str, object]:
        config = TraceConfig(requests=60, rate=20.0, prefix_groups=3, prefix_tokens="uniform:16:90", seed=seed)
        return simulate(Setup(trace=config), random_trace(config))[0].as_dict()

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_host_copies_cost_time() -> None:
    """Two prefixes that do not fit together: with host memory they are copied, not computed again."""
    trace = [TraceRequest(10.0 * n, 200, 1, "ab"[n % 2], 200) for n in range(6)]
    machine = {"step_ms": 1.0, "prefill_token_us": 100.0, "kv_token_ns": 0.0, "attention_pair_ns": 0.0}

    def ttft(host_blocks: int, block_copy_us: float) -> float:
        config = MachineConfig(**machine, host_blocks=host_blocks, block_copy_us=block_copy_us)
        cache = CacheConfig(kv_cache_tokens=256, block_size=16)
        return simulate(Setup(machine=config, cache=cache), trace)[0].ttft_s.mean

    free, dear = ttft(64, 0.0), ttft(64, 100.0)
    assert free < dear < ttft(0, 100.0)


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([1, 2, 3, 4], share) for share in (0.0, 0.25, 0.26, 0.5, 0.99, 1.0)] == [1, 1, 2, 2, 4, 4]
    assert percentile([], 0.5) == 0
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 2.0, 3.0, 3.0, 3.0)


def test_the_timeline_shows_the_most_of_each_stretch() -> None:
    timeline = Timeline()
    for time_s, running in [(1.0, 3), (2.0, 9), (2.1, 1), (8.0, 5), (10.0, 0)]:
        timeline.add(time_s, running, 0, running / 10)
    assert [c.running for c in timeline.columns(5)] == [9, 1, 1, 5, 0]
    assert [c.running for c in timeline.columns(5, end_s=20.0)] == [9, 5, 0, 0, 0]
    text = plot(timeline, 10)
    assert all(name in text for name in ("running", "waiting", "KV use", "100%", "10 s"))
    assert len({len(line) for line in text.splitlines()}) <= 2
    assert plot(Timeline(), 10)
