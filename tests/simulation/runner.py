"""Runs seeds: one, with everything it did, or many, as fast as they go.

A run of one seed is a function: the same seed gives the same events and so the same digest, on every machine with the
same versions. Used by the command line and by the tests.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import trio

from tests.simulation.determinism import VirtualClock, WallClock, deterministic
from tests.simulation.programs import remember_scheduler
from tests.simulation.scenario import Scenario, draw
from tests.simulation.world import World

COLLECT_EVERY = 50
LOGGERS = ("aserve", "aserve.access")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed. ``violation`` is None if everything held."""

    seed: int
    violation: str | None
    digest: str
    events: tuple[tuple[Any, ...], ...]


def run_seed(seed: int, *, scenario: Scenario | None = None) -> Outcome:
    """Run one seed's scenario, or the one given, in this thread and a trio loop of its own."""
    scenario = scenario or draw(seed)
    clock = VirtualClock(running=scenario.standalone)
    wall = WallClock(clock)
    with deterministic(seed, clock, wall):
        return _run(scenario, clock, wall)


def _run(scenario: Scenario, clock: VirtualClock, wall: WallClock) -> Outcome:
    worlds: list[World] = []

    async def main() -> None:
        world = World(scenario, clock, wall)
        worlds.append(world)
        with world.program.replaced(), remember_scheduler(world), _watched_logs(world):
            await world.run()

    try:
        trio.run(main, clock=clock)
    except BaseException as error:  # a crash is a violation, too
        if isinstance(error, KeyboardInterrupt):
            raise
        world = worlds[0]
        world.violation = world.violation or f"crashed: {_leaf(error)!r}"
        world.crash = error
    world = worlds[0]
    digest = blake2b(repr(world.events).encode(), digest_size=16).hexdigest()
    return Outcome(scenario.seed, world.violation, digest, tuple(world.events))


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if error.__cause__ is None else _leaf(error.__cause__)


class _LogWatch(logging.Handler):
    """Errors in the log need a reason, too."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note_log(record)


@contextmanager
def _watched_logs(world: World) -> Generator[None]:
    logger = logging.getLogger("aserve")
    saved = logger.level, logger.handlers, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.handlers, logger.propagate = [_LogWatch(world)], False
    hook = sys.unraisablehook
    sys.unraisablehook = lambda args: world.expect(False, f"in a finaliser: {args.exc_value!r}")
    try:
        yield
    finally:
        logger.level, logger.handlers, logger.propagate = saved
        logger.manager._clear_cache()
        sys.unraisablehook = hook


def run_seeds(seeds: Iterable[int], tell: Callable[[Outcome], object]) -> None:
    """Run many, and tell of each. What is loaded already is not collected in between."""
    gc.collect()
    gc.freeze()
    for count, seed in enumerate(seeds, start=1):
        tell(run_seed(seed))
        if count % COLLECT_EVERY == 0:
            gc.collect()
    gc.unfreeze()


def first_failure(seeds: Iterable[int]) -> Outcome | None:
    """The first seed in which something does not hold, if there is one."""
    for seed in seeds:
        outcome = run_seed(seed)
        if outcome.violation is not None:
            return outcome
    return None
