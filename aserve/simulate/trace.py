"""The requests of a simulation: drawn from distributions and a seed, or read from lines of JSON.

Lengths only: what the tokens are is decided by ``simulation``, so that requests of one prefix group share their
beginning and nothing else does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, cast

from aserve.core.errors import ConfigError
from aserve.simulate.lengths import Lengths


class TraceRequest(NamedTuple):
    """One request.

    Attributes:
        arrival_s: when it comes, in seconds from the start.
        prompt_tokens: length of the prompt, the shared prefix included.
        output_tokens: length of the answer.
        prefix: the group whose members begin alike; None for none.
        prefix_tokens: how long the members' common beginning is.
        priority: as in a request to the server.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: str | None = None
    prefix_tokens: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """The requests that arrive.

    Attributes:
        trace: A file with one request a line, {"arrival_s", "prompt_tokens", "output_tokens"} and, where wanted,
            "prefix", "prefix_tokens", "priority"; in place of the random requests that the other flags describe.
        requests: How many requests arrive.
        rate: Requests per second, arriving independently of each other (Poisson); 0: all at the start.
        prompt_tokens: Length of the prompts without a shared prefix: 512, uniform:10:200 (lowest, highest) or
            lognormal:300:0.8:4000 (median, sigma, longest).
        output_tokens: Length of the answers, likewise.
        prefix_groups: Every prompt begins with one of so many shared prefixes.
        prefix_tokens: Length of the shared prefixes, likewise.
        priorities: Priorities given out in turn.
        seed: Chance of everything above; the same seed gives the same figures.
    """

    trace: str | None = None
    requests: int = 200
    rate: float = 1.0
    prompt_tokens: str = "lognormal:300:1.0:8000"
    output_tokens: str = "lognormal:150:0.7:2000"
    prefix_groups: int = 0
    prefix_tokens: str = "500"
    priorities: tuple[int, ...] = (0,)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("requests", 1), ("rate", 0), ("prefix_groups", 0)):
            if not low <= getattr(self, name) < float("inf"):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be at least {low}, got {getattr(self, name)}")
        if not self.priorities:
            raise ConfigError("--priorities needs at least one number")
        self.lengths("prompt_tokens")
        self.lengths("output_tokens")
        self.lengths("prefix_tokens")

    def lengths(self, name: str) -> Lengths:
        """The distribution that a field describes."""
        return Lengths.parse(getattr(self, name), flag="--" + name.replace("_", "-"))


def random_trace(config: TraceConfig) -> tuple[TraceRequest, ...]:
    """Requests by the configuration's distributions. Raises ConfigError."""
    random = Random(config.seed)
    prompts, outputs = config.lengths("prompt_tokens"), config.lengths("output_tokens")
    prefixes = [config.lengths("prefix_tokens").draw(random) for _ in range(config.prefix_groups)]
    now_s = 0.0
    requests: list[TraceRequest] = []
    for index in range(config.requests):
        now_s += random.expovariate(config.rate) if config.rate else 0.0
        group = random.randrange(len(prefixes)) if prefixes else -1
        shared = prefixes[group] if prefixes else 0
        requests.append(
            TraceRequest(
                arrival_s=now_s,
                prompt_tokens=shared + prompts.draw(random),
                output_tokens=outputs.draw(random),
                prefix=str(group) if prefixes else None,
                prefix_tokens=shared,
                priority=config.priorities[index % len(config.priorities)],
            )
        )
    return tuple(requests)


def parse_trace(lines: Iterable[str], name: str) -> tuple[TraceRequest, ...]:
    """Requests from lines of JSON, in order of arrival. ``name`` says in errors where they come from.

    Raises ConfigError, which names the line.
    """
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                requests.append(_parse(line))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{name} line {number}: {error}") from error
    if not requests:
        raise ConfigError(f"{name} has no requests")
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def _parse(line: str) -> TraceRequest:
    parsed: Any = json.loads(line)
    if not isinstance(parsed, dict):
        raise ValueError("a request is a JSON object")
    fields = cast("dict[str, Any]", parsed)
    unknown = sorted(fields.keys() - set(TraceRequest._fields))
    missing = [name for name in TraceRequest._fields[:3] if name not in fields]
    if unknown or missing:
        raise ValueError(f"unknown {', '.join(unknown)}" if unknown else f"{', '.join(missing)} missing")
    arrival_s = fields["arrival_s"]
    if isinstance(arrival_s, bool) or not isinstance(arrival_s, int | float) or not 0 <= arrival_s < float("inf"):
        raise ValueError(f"arrival_s must be a number of seconds from 0, got {arrival_s!r}")
    for field, low in (("prompt_tokens", 1), ("output_tokens", 1), ("prefix_tokens", 0), ("priority", -(2**63))):
        value = fields.get(field, low)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{field} must be a whole number of at least {low}, got {value!r}")
    prefix = fields.get("prefix")
    known: dict[str, Any] = fields | {"prefix": None if prefix is None else str(prefix)}
    request = TraceRequest(**known)
    if request.prefix_tokens and (request.prefix is None or request.prefix_tokens > request.prompt_tokens):
        raise ValueError("prefix_tokens needs a prefix, and a prompt_tokens that is no less")
    return request


def longest(requests: Sequence[TraceRequest]) -> int:
    """Tokens of the longest request, prompt and answer together."""
    return max(request.prompt_tokens + request.output_tokens for request in requests)
