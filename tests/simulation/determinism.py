"""Everything that could differ between two runs of one seed, replaced for as long as a run lasts.

Clocks, the order in which trio runs its tasks, random numbers, ids, worker threads and the garbage collector. Knows
of aserve only the clock. Used by the runner, around each seed.
"""

from __future__ import annotations

import gc
import math
import random
import secrets
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio.to_thread
import trio
from anyio.lowlevel import checkpoint_if_cancelled

from aserve.server.clock import RunningClock


class Chance(random.Random):
    """A stream of decisions. Streams with different names are independent, so one fault more moves no other."""

    def __init__(self, seed: int, name: str) -> None:
        super().__init__(f"{seed}/{name}")

    def flip(self, probability: float) -> bool:
        return self.random() < probability


class VirtualClock(trio.abc.Clock):
    """Stands still while any task can run, then jumps to the next deadline.

    Nothing here waits for the system, so trio asks how long to sleep exactly when no task can run. The one exception
    is trio's own end, which goes through its wake-up socket.

    Args:
        running: whether the loop has the server's own clock, which leaves out time in which the process was stopped.
    """

    def __init__(self, *, running: bool) -> None:
        self.machine_s = 0.0
        self._inner = RunningClock(lambda: self.machine_s) if running else None
        self._num_asked_in_vain = 0

    @property
    def now_s(self) -> float:
        """The loop's time; looking at it here changes nothing."""
        return self.machine_s - (0.0 if self._inner is None else self._inner.stopped_s)

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self.machine_s if self._inner is None else self._inner.current_time()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if deadline == math.inf:
            self._num_asked_in_vain += 1
            if self._num_asked_in_vain > 100:
                raise RuntimeError("no task can run, and no deadline will change that")
            return 0.0
        sleep_s = deadline - self.machine_s if self._inner is None else self._inner.deadline_to_sleep_time(deadline)
        if sleep_s > 0:  # and at least by the smallest step there is, lest rounding stop the clock
            self.machine_s = math.nextafter(self.machine_s + sleep_s, math.inf)
        return 0.0

    def jump(self, seconds: float) -> None:
        """What a stopped process sees: time has passed, and nothing has run."""
        self.machine_s += seconds


class WallClock:
    """The time of day: runs with the virtual clock, until somebody sets it."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.offset_s = 1.7e9

    def __call__(self) -> float:
        return self._clock.machine_s + self.offset_s


@contextmanager
def replace(replaced: Mapping[tuple[Any, str], object]) -> Generator[None]:
    """Have (owner, name) mean something else for a while. A tenth of the cost of ``unittest.mock.patch``."""
    saved = {(owner, name): getattr(owner, name) for owner, name in replaced}
    try:
        for (owner, name), value in replaced.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in saved.items():
            setattr(owner, name, value)


@contextmanager
def deterministic(seed: int, clock: VirtualClock, wall: WallClock) -> Generator[None]:
    """Make a ``trio.run`` with this clock depend on the seed alone."""
    chance = Chance(seed, "interpreter")
    saved = random.getstate()
    random.seed(chance.getrandbits(64))
    replaced: dict[tuple[Any, str], object] = {
        # as Hypothesis has it: batches of runnable tasks are sorted, then shuffled by the seeded generator
        (trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING"): True,
        (trio._core._run, "_r"): Chance(seed, "task order"),
        (time, "time"): wall,
        (time, "monotonic"): lambda: clock.machine_s,
        (time, "perf_counter"): lambda: clock.machine_s,
        (uuid, "uuid4"): lambda: uuid.UUID(int=chance.getrandbits(128), version=4),
        (secrets, "token_hex"): lambda size=32: chance.randbytes(size).hex(),
        (secrets, "randbits"): chance.getrandbits,
        (anyio.to_thread, "run_sync"): _Workers(Chance(seed, "workers")),
    }
    collecting = gc.isenabled()
    gc.disable()  # finalisers run when the last reference goes, never at a moment that depends on the heap
    try:
        with replace(replaced):
            yield
    finally:
        random.setstate(saved)
        if collecting:
            gc.enable()


class _Workers:
    """``anyio.to_thread.run_sync`` without threads: takes virtual time and, as there, is not interrupted."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    async def __call__(self, function: Callable[..., Any], *args: Any, limiter: Any = None, **_: Any) -> Any:
        await checkpoint_if_cancelled()
        if limiter is not None:
            await limiter.acquire()
        try:
            with trio.CancelScope(shield=True):
                await trio.sleep(self._chance.choice((0.0, 0.0, 0.0, 0.001, 0.02)))
            return function(*args)
        finally:
            if limiter is not None:
                limiter.release()
