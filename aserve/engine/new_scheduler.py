"""A scheduler as the configuration asks for it. Called by the engine, on the step thread."""

from __future__ import annotations

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig
from aserve.scheduler import Scheduler


def make_scheduler(config: EngineConfig, capacity: Capacity) -> Scheduler:
    """Return an empty scheduler of what the executor can hold."""
    return Scheduler(
        capacity,
        policy=config.scheduler.policy,
        aging_steps=config.scheduler.aging_steps,
        prefix_lookahead=config.scheduler.prefix_lookahead,
        prefix_cache=config.cache.prefix_cache,
    )
