"""The order of admission and, reversed, of preemption, as a key function per policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from aserve.core.request import Request

PolicyKey = tuple[int, int]
"""Lower goes first. The last part is the arrival, so keys of different requests never compare equal."""

Policy = Literal["fcfs", "priority"]


def _by_arrival(request: Request) -> PolicyKey:
    return (0, request.arrival_index)


def _by_priority(request: Request) -> PolicyKey:
    return (request.priority, request.arrival_index)


def key_function(policy: Policy) -> Callable[[Request], PolicyKey]:
    """The key of a policy: ``fcfs`` by arrival, ``priority`` by priority, then by arrival."""
    return {"fcfs": _by_arrival, "priority": _by_priority}[policy]
