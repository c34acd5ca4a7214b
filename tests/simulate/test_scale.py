"""The size of a busy day: ten thousand requests wait beside a million cached blocks."""

from __future__ import annotations

import pytest

from aserve.core.config import CacheConfig
from aserve.simulate import MachineConfig, Setup, TraceRequest
from aserve.simulate.simulation import Simulation


@pytest.mark.slow
def test_ten_thousand_wait_beside_a_million_cached_blocks() -> None:
    setup = Setup(machine=MachineConfig(machine="h200"), cache=CacheConfig(kv_cache_tokens=18_000_000))
    fill = [TraceRequest(0.0, 16_000, 1) for _ in range(1_050)]
    burst = [TraceRequest(10_000.0, 100, 8) for _ in range(10_500)]
    scheduler = setup.make_scheduler()
    outcome = Simulation(scheduler, setup.machine.cost_model, [*fill, *burst]).run()
    assert scheduler.kv.pool.num_indexed > 1_000_000
    assert outcome.peak_waiting > 10_000
    assert [times.num_tokens for times in outcome.times] == [1] * len(fill) + [8] * len(burst)
    assert outcome.stats.num_used_blocks == 0
