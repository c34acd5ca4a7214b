"""What the policies are for, on the virtual clock: streams go on, short prompts get ahead, and nobody starves."""

from __future__ import annotations

import pytest

from aserve.core.config import CacheConfig, SchedulerConfig
from aserve.simulate import MachineConfig, Setup, TraceConfig, TraceRequest, simulate
from aserve.simulate.cost import PRESETS
from aserve.simulate.report import percentile
from aserve.simulate.trace import random_trace


@pytest.mark.parametrize("machine", ["cpu", "h200"])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prefill"])
def test_a_long_prompt_does_not_hold_up_the_streams(machine, policy) -> None:
    """100,000 tokens arrive amid 64 streams: these get a token per step, and a step is no longer than its budget.

    Without the part of attention that grows with the square of the context: that is work which makes a chunk at the
    end of such a prompt longer than one at its beginning, and which no order of steps avoids.
    """
    setup = Setup(
        machine=MachineConfig(machine=machine, attention_pair_ns=0.0),
        scheduler=SchedulerConfig(policy=policy, max_num_seqs=80),
        cache=CacheConfig(kv_cache_tokens=200_000),
    )
    chunk = PRESETS[machine].max_batch_tokens - 64
    trace = [TraceRequest(0.0, 64, 400) for _ in range(64)] + [TraceRequest(10.0, 100_000, 10)]
    report, outcome = simulate(setup, trace)
    cost = setup.machine.cost_model
    budget_s = cost.host_ms * 1e-3 + cost.step_s([(300, 1)] * 64 + [(0, chunk)])
    long = outcome.times[-1]
    assert all(t.admitted_s < long.admitted_s < long.first_token_s for t in outcome.times[:-1])
    assert report.num_preemptions == 0
    assert percentile(sorted(outcome.gaps_s), 0.99) <= 1.5 * budget_s
    assert max(outcome.gaps_s) <= 2 * budget_s


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_short_prompts_get_ahead_of_long_ones(machine) -> None:
    """On a mixed and busy trace, the wait in proportion to a request's own work falls several times over."""
    rate, prompts = {"cpu": (1.0, "lognormal:200:1.8:20000"), "h200": (14.0, "lognormal:800:1.5:60000")}[machine]
    trace = random_trace(TraceConfig(requests=300, rate=rate, prompt_tokens=prompts, output_tokens="lognormal:60:0.7"))

    def report(policy):
        cache = CacheConfig(kv_cache_tokens=400_000)
        return simulate(
            Setup(machine=MachineConfig(machine=machine), scheduler=SchedulerConfig(policy=policy), cache=cache), trace
        )[0]

    fcfs, shortest = report("fcfs"), report("shortest-prefill")
    assert fcfs.slowdown.mean > 3 * shortest.slowdown.mean
    assert fcfs.ttft_s.mean > 1.5 * shortest.ttft_s.mean
    assert shortest.output_tokens_per_s > 0.95 * fcfs.output_tokens_per_s


def favourites(policy: str) -> tuple[TraceRequest, list[TraceRequest]]:
    """One request that the policy likes least, and many that it likes best, more than the machine can serve."""
    victim = TraceRequest(2.0, 2_000, 5, priority=3)
    return victim, [TraceRequest(0.01 * n, 100, 20, priority=0) for n in range(2_000)]


def wait_of_victim(policy: str, aging_steps: int) -> tuple[float, float]:
    """How long it waits for its first token, and when the last favourite has its own."""
    victim, others = favourites(policy)
    trace = sorted([victim, *others], key=lambda request: request.arrival_s)
    setup = Setup(
        scheduler=SchedulerConfig(policy=policy, aging_steps=aging_steps, max_num_seqs=8, max_batch_tokens=512),
        machine=MachineConfig(step_ms=10.0, prefill_token_us=100.0, decode_row_us=100.0),
        cache=CacheConfig(kv_cache_tokens=32_768),
    )
    _, outcome = simulate(setup, trace)
    times = outcome.times[trace.index(victim)]
    return times.first_token_s - times.arrival_s, max(t.first_token_s for t in outcome.times)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prefill"])
def test_nobody_starves(policy) -> None:
    """Under a load that never lets up, the least favoured request still begins when its handicap has passed."""
    wait_s, end_s = wait_of_victim(policy, aging_steps=100)
    assert wait_s < end_s / 2


@pytest.mark.parametrize("policy", ["priority", "shortest-prefill"])
def test_without_ageing_it_would(policy) -> None:
    """The load of the test above is one under which an order that never ages keeps a request waiting to the end."""
    wait_s, end_s = wait_of_victim(policy, aging_steps=10**9)
    assert wait_s > 0.95 * end_s
