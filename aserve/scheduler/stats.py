"""The scheduler's numbers at one moment."""

from __future__ import annotations

from typing import NamedTuple


class SchedulerStats(NamedTuple):
    """Gauges, then counters since the start.

    ``num_used_blocks`` counts blocks that sequences or fences hold; free blocks with a reusable prefix are not used.
    ``num_prefix_queries`` and ``num_prefix_hits`` count prompt tokens looked up and found at first admission;
    ``num_host_hits`` counts the admissions for which host memory had a part of the prefix, ``num_restored_tokens`` its
    tokens.
    """

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_host_hits: int = 0
    num_restored_tokens: int = 0
