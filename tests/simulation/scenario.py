"""What one seed stands for: the size of the engine, the limits of the server, who asks for what, and which faults.

Everything is drawn before anything runs. Each seed turns only some kinds of fault on, so that rare combinations come
up undiluted. Pure; read by the world.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    prefix_cache = chance.flip(0.8)
    capacity = Capacity(
        num_blocks=chance.randint(8, 28),
        block_size=chance.choice((2, 4, 4)),
        max_num_seqs=chance.randint(1, 6),
        max_batch_tokens=chance.randint(5, 40),
        max_model_len=chance.choice((24, 64, 96)),
        max_in_flight=chance.choice((1, 2)),
        windows=chance.choice(((None,), (None,), (None,), (6,), (None, 8))),
        num_host_blocks=chance.choice((0, 0, 6)) if prefix_cache else 0,
        parity_context=chance.choice((None, 4, 30)),
    )
    standalone = chance.flip(0.6)
    step_s = chance.choice((0.0, 0.002, 0.01, 0.03))
    span_s = chance.choice((0.01, 15 * step_s, 40 * step_s, 1.0))  # all at once, or one after the other
    faults = _draw_faults(chance, standalone=standalone, span_s=span_s + 25 * step_s)
    begin_s = chance.choice((0.0, 0.001, faults.load_s, faults.load_s + 0.05, faults.load_s + 0.05))
    calm = chance.flip(0.15)
    asks = tuple(
        draw_ask(Chance(seed, f"ask {index}"), index, capacity, at_s=begin_s + chance.uniform(0, span_s), calm=calm)
        for index in range(chance.randint(3, 11))
    )
    return Scenario(
        seed=seed,
        standalone=standalone,
        capacity=capacity,
        engine=EngineConfig(
            model=ModelConfig(model="simulated"),
            cache=CacheConfig(prefix_cache=prefix_cache),
            scheduler=SchedulerConfig(
                max_queue=chance.choice((0, 1, 2, 4, 8, 100, 100)),
                max_queue_tokens=chance.choice((None, None, None, None, 0, 40)),
                max_queue_wait_s=Chance(seed, "queue wait").choice((None, None, None, 0.0, 2 * step_s, 1.0)),
                policy=chance.choice(("fcfs", "priority", "shortest-prefill")),
                aging_steps=chance.choice((1, 8, 256)),
                prefix_lookahead=chance.choice((0, 0, 3)) * prefix_cache,
            ),
        ),
        server=_draw_server(chance, step_s),
        faults=replace(faults, step_s=step_s),
        asks=asks,
    )


def _draw_server(chance: Chance, step_s: float) -> ServerConfig:
    short_s = 12 * step_s + 0.01  # what a request may take, if not much stands in its way
    return ServerConfig(
        api_key=(KEY,),
        max_body_bytes=2000,
        max_requests_per_key=chance.choice((None, None, None, 4)),
        request_timeout_s=chance.choice((None, None, None, 2 * short_s, 5.0)),
        queue_timeout_s=chance.choice((None, None, None, short_s, 2.0)),
        idle_timeout_s=chance.choice((None, None, None, short_s, 2.0)),
        read_timeout_s=2.0,
        stall_timeout_s=chance.choice((2.0, 30.0)),
        sse_keepalive_s=chance.choice((0.0, 0.02, 0.2, 15.0)),
        drain_timeout_s=chance.choice((0.0, short_s, 1.0, 60.0, 60.0)),
        watchdog_s=20.0,
    )


def _draw_faults(chance: Chance, *, standalone: bool, span_s: float) -> Faults:
    """Each kind is on in some seeds only, at moments within the span in which most happens."""
    drawn: dict[str, Any] = {}
    if chance.flip(0.15):
        drawn[chance.choice(("fail_submit", "fail_wait"))] = chance.choice((0, 1, 3, 10, 20, 40))
    elif chance.flip(0.06):
        drawn["hang_at_move"] = chance.randint(1, 60)
    if chance.flip(0.2):
        drawn |= {"slow_share": chance.choice((0.02, 0.2)), "slow_s": chance.choice((0.2, 3.0, 25.0))}
    if chance.flip(0.2):
        drawn |= {"load_s": chance.choice((0.02, 1.0)), "load_fails": chance.flip(0.15)}
    if chance.flip(0.3):
        drawn["wall_jumps"] = tuple((chance.uniform(0, span_s), chance.choice((-86400.0, 3600.0))) for _ in range(2))
    if chance.flip(0.15):
        drawn["pauses"] = ((chance.uniform(0, span_s), chance.choice((0.3, 5.0, 40.0))),)
    if chance.flip(0.25):
        drawn["resets"] = tuple(chance.uniform(0, span_s) for _ in range(2))
    if chance.flip(0.3):
        drawn["stop_s"] = chance.choice((0.0, *(chance.uniform(0, span_s) for _ in range(6))))
        if standalone and chance.flip(0.2):
            drawn["second_signal_s"] = chance.choice((0.0, 0.01, 1.5))
    return Faults(**drawn)
