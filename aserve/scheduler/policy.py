"""The order of admission and, reversed, of preemption: a key per request, fixed when it arrives.

Keys never change, so a heap of waiting requests stays a heap however long they wait, and ageing costs nothing: instead
of raising what waits, everything that arrives later gets a larger key. The age is counted in steps, not in seconds: the
scheduler reads no clock, and a step is what a running stream gets one token for, on any machine.

A key is the arrival (the step) plus a handicap, in units of 1/``max_batch_tokens`` of a step. Whoever arrives once the
handicap has passed goes behind, so nothing starves: a request is overtaken during that many steps at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from aserve.core.request import Request

PolicyKey = tuple[int, int]
"""Lower goes first. The last part is the arrival, so keys of different requests never compare equal."""

Policy = Literal["fcfs", "priority", "shortest-prefill"]

KeyOf = Callable[[Request, int], PolicyKey]
"""(request, step at which it arrives) -> key."""


def key_function(policy: Policy, *, aging_steps: int, max_batch_tokens: int) -> KeyOf:
    """The key of a policy, as a function of a request and of the step at which it arrives.

    ``fcfs`` goes by arrival. Under ``priority`` a level costs ``aging_steps``: a request of priority 1 runs as one of
    priority 0 that arrived so much later. Under ``shortest-prefill`` a prompt that fills one step costs them, a longer
    or shorter one in proportion: the wait that others may cause grows with a request's own work, as under highest
    response ratio next, but linearly, so that the order of two requests never changes while they wait.
    """

    def by_arrival(request: Request, step: int) -> PolicyKey:
        del step
        return (0, request.arrival_index)

    def by_priority(request: Request, step: int) -> PolicyKey:
        return (step + request.priority * aging_steps, request.arrival_index)

    def by_prefill(request: Request, step: int) -> PolicyKey:
        return (step * max_batch_tokens + len(request.prompt_token_ids) * aging_steps, request.arrival_index)

    functions: dict[Policy, KeyOf] = {"fcfs": by_arrival, "priority": by_priority, "shortest-prefill": by_prefill}
    return functions[policy]
