"""The clock that leaves out the time in which the process was stopped."""

import pytest
import trio

from aserve.server.clock import RunningClock


class Source:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_asleep_counts_and_time_stopped_does_not() -> None:
    source = Source()
    clock = RunningClock(source)
    began = clock.current_time()
    assert clock.deadline_to_sleep_time(began + 30) == 30
    source.now += 30.2  # as agreed, and a little late
    assert clock.current_time() - began == pytest.approx(30.2)
    clock.deadline_to_sleep_time(began + 31)
    source.now += 600
    assert clock.current_time() - began == pytest.approx(31, abs=0.3)
    assert clock.stopped_s == pytest.approx(599.2, abs=0.3)
    source.now += 0.9  # a busy loop is not a stopped one
    assert clock.current_time() - began == pytest.approx(31.9, abs=0.3)


def test_sleep_without_an_end_is_never_too_long() -> None:
    source = Source()
    clock = RunningClock(source)
    began = clock.current_time()
    clock.deadline_to_sleep_time(float("inf"))
    source.now += 5000
    assert clock.current_time() - began == 5000


def test_loop_with_it() -> None:
    """A sleep during which the source jumps still takes its time."""
    source_stops = 0.0

    def source() -> float:
        import time

        return time.perf_counter() + source_stops

    async def main() -> None:
        nonlocal source_stops
        with trio.move_on_after(3) as limit:
            await trio.sleep(0.05)
            source_stops = 1000.0
            await trio.sleep(0.05)
        assert not limit.cancelled_caught

    trio.run(main, clock=RunningClock(source))
