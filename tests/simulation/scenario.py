"""What one seed stands for: the size of the engine, the limits of the server, who asks for what, and which faults.

Everything is drawn before anything runs. Each seed turns only some kinds of fault on, so that rare combinations come
up undiluted. Pure; read by the world.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aserve.core.capacity import Capacity
from aserve.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from tests.simulation.asks import KEY, Ask, draw_ask
from tests.simulation.determinism import Chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of the engine and of the machine; those of clients are in their requests.

    Attributes:
        fail_submit, fail_wait: the step whose submission or result raises.
        hang_at_move: the step loop's move that never returns, as in a driver call.
        slow_share, slow_s: how many steps take how long; the others take ``step_s``.
        load_s, load_fails: how the model loads.
        wall_jumps: (when, seconds) the time of day is set.
        pauses: (when, seconds) the whole process stands still.
        resets: when the prefix cache is reset.
        stop_s: when the program is told to stop; after the last request, if None.
        second_signal_s: a second signal, so long after the first.
    """

    fail_submit: int | None = None
    fail_wait: int | None = None
    hang_at_move: int | None = None
    slow_share: float = 0.0
    slow_s: float = 0.0
    step_s: float = 0.01
    load_s: float = 0.0
    load_fails: bool = False
    wall_jumps: tuple[tuple[float, float], ...] = ()
    pauses: tuple[tuple[float, float], ...] = ()
    resets: tuple[float, ...] = ()
    stop_s: float | None = None
    second_signal_s: float | None = None

    @property
    def kills(self) -> bool:
        """Whether the step loop may fail."""
        return self.fail_submit is not None or self.fail_wait is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One seed's world."""

    seed: int
    standalone: bool  # a server process, or a program that embeds engine and application
    capacity: Capacity
    engine: EngineConfig
    server: ServerConfig
    faults: Faults
    asks: tuple[Ask, ...] = field(default=())


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    chance = Chance(seed, "scenario")
    capacity = Capacity(
        num_blocks=chance.randint(8, 24),
        block_size=chance.choice((2, 4, 4)),
        max_num_seqs=chance.randint(1, 5),
        max_batch_tokens=chance.randint(5, 32),
        max_model_len=chance.choice((24, 40, 96)),
        max_in_flight=chance.choice((1, 2)),
    )
    standalone = chance.flip(0.6)
    faults = _draw_faults(chance, standalone=standalone)
    span_s = chance.choice((0.0, 0.05, 0.5, 3.0))  # all at once, or one after the other
    calm = chance.flip(0.15)
    asks = tuple(
        draw_ask(Chance(seed, f"ask {index}"), index, capacity, at_s=chance.uniform(0, span_s), calm=calm)
        for index in range(chance.randint(2, 10))
    )
    return Scenario(
        seed=seed,
        standalone=standalone,
        capacity=capacity,
        engine=EngineConfig(
            model=ModelConfig(model="simulated"),
            cache=CacheConfig(prefix_cache=chance.flip(0.8)),
            scheduler=SchedulerConfig(
                max_queue=chance.choice((0, 1, 2, 4, 100)),
                max_queue_tokens=chance.choice((None, None, 0, 40)),
                policy=chance.choice(("fcfs", "priority", "shortest-prefill")),
                aging_steps=chance.choice((1, 8, 256)),
                prefix_lookahead=chance.choice((0, 0, 3)),
            ),
        ),
        server=ServerConfig(
            max_body_bytes=2000,
            api_key=(KEY,),
            max_requests_per_key=chance.choice((None, None, None, 3)),
            request_timeout_s=chance.choice((None, None, 5.0)),
            queue_timeout_s=chance.choice((None, None, 0.03, 2.0)),
            idle_timeout_s=chance.choice((None, None, 0.03, 2.0)),
            read_timeout_s=2.0,
            stall_timeout_s=chance.choice((2.0, 30.0)),
            sse_keepalive_s=chance.choice((0.0, 0.2, 15.0)),
            drain_timeout_s=chance.choice((0.0, 0.05, 1.0, 60.0, 60.0)),
            watchdog_s=20.0,
        ),
        faults=faults,
        asks=asks,
    )


def _draw_faults(chance: Chance, *, standalone: bool) -> Faults:
    """Each kind is on in some seeds only."""
    drawn: dict[str, Any] = {"step_s": chance.choice((0.0, 0.001, 0.01, 0.05))}
    if chance.flip(0.15):
        drawn[chance.choice(("fail_submit", "fail_wait"))] = chance.choice((0, 1, 2, 5, 10, 20))
    elif chance.flip(0.06):
        drawn["hang_at_move"] = chance.randint(1, 40)
    if chance.flip(0.2):
        drawn |= {"slow_share": 0.1, "slow_s": chance.choice((0.5, 3.0, 25.0))}
    if chance.flip(0.2):
        drawn |= {"load_s": chance.choice((0.02, 1.0)), "load_fails": chance.flip(0.15)}
    if chance.flip(0.3):
        drawn["wall_jumps"] = tuple((chance.uniform(0, 1), chance.choice((-86400.0, 3600.0))) for _ in range(2))
    if chance.flip(0.15):
        drawn["pauses"] = ((chance.uniform(0, 1), chance.choice((0.3, 5.0, 40.0))),)
    if chance.flip(0.25):
        drawn["resets"] = tuple(chance.uniform(0, 1) for _ in range(2))
    if chance.flip(0.4):
        drawn["stop_s"] = chance.choice((0.0, chance.uniform(0, 0.1), chance.uniform(0, 2)))
        if standalone and chance.flip(0.2):
            drawn["second_signal_s"] = chance.choice((0.0, 0.01, 1.5))
    return Faults(**drawn)
