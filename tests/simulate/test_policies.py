"""What the policies are for, on the virtual clock: streams go on, short prompts get ahead, and nobody starves."""

from __future__ import annotations

import pytest

from aserve.core.config import CacheConfig, SchedulerConfig
from aserve.simulate import MachineConfig, Setup, TraceConfig, TraceRequest, simulate
from aserve.simulate.cost import PRESETS
from aserve.simulate.simulation import Outcome
from aserve.simulate.trace import random_trace


def long_prompt_amid_streams(
    machine: str, policy: str = "fcfs", *, parity_context: int | None = None
) -> tuple[Setup, float, Outcome]:
    """100,000 tokens arrive amid 64 streams that go on until after their first token.

    Returns the setup, the seconds of a step with a full budget and no context but the streams', and what happened. On
    the CPU, where such a prompt takes half an hour, all but the last 3,000 tokens are cached: those with most context.
    """
    setup = Setup(
        machine=MachineConfig(machine=machine, parity_context=parity_context),
        scheduler=SchedulerConfig(policy=policy, max_num_seqs=80, aging_steps=1),
        cache=CacheConfig(kv_cache_tokens=300_000),
    )
    cached, begin_s, num_stream_tokens = {"cpu": (97_000, 2_000.0, 1_000), "h200": (0, 0.0, 250)}[machine]
    trace = [TraceRequest(begin_s, 64, num_stream_tokens) for _ in range(64)]
    trace.append(TraceRequest(begin_s + 0.5, 100_000, 10, prefix="p", prefix_tokens=cached))
    if cached:
        trace.insert(0, TraceRequest(0.0, cached + 1, 1, prefix="p", prefix_tokens=cached))
    _, outcome = simulate(setup, trace)
    streams, long = outcome.times[-65:-1], outcome.times[-1]
    assert all(t.first_token_s < long.admitted_s < long.first_token_s < t.last_token_s for t in streams)
    cost, chunk = setup.machine.cost_model, PRESETS[machine].max_batch_tokens - 64
    budget_s = cost.host_ms * 1e-3 + cost.step_s([(64 + num_stream_tokens // 2, 1)] * 64 + [(0, chunk)])
    return setup, budget_s, outcome


@pytest.mark.parametrize("machine", ["cpu", "h200"])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prefill"])
def test_a_long_prompt_does_not_hold_up_the_streams(machine, policy) -> None:
    """They get a token per step, and no step is much longer than its budget, for all that attention costs."""
    _, budget_s, outcome = long_prompt_amid_streams(machine, policy)
    assert outcome.stats is not None
    assert outcome.stats.num_preemptions == 0
    assert max(outcome.gaps_s) <= 1.5 * budget_s


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_by_tokens_alone_it_would(machine) -> None:
    """The attention of these machines is one that makes the last chunks many times as long as the first."""
    _, budget_s, outcome = long_prompt_amid_streams(machine, parity_context=0)
    assert max(outcome.gaps_s) > 5 * budget_s


def test_streams_cost_a_long_prompt_little() -> None:
    """The work is the same, in more steps; what is added is what the streams take."""
    setup, _, outcome = long_prompt_amid_streams("h200")
    long = outcome.times[-1]
    assert long.first_token_s - long.arrival_s < 1.1 * setup.alone_s(100_000)


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_alone_a_long_prompt_takes_whole_steps(machine) -> None:
    """With nobody to be held up, the context of a chunk is no reason to make it smaller."""
    setup = Setup(machine=MachineConfig(machine=machine, host_ms=0.0), cache=CacheConfig(kv_cache_tokens=100_016))
    _, outcome = simulate(setup, [TraceRequest(0.0, 100_000, 1)])
    assert outcome.times[0].first_token_s == pytest.approx(setup.alone_s(100_000))


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
