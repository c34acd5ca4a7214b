"""Noisy clients together get a third of the loop's time; others never wait for a turn."""

import pytest
import trio
import trio.testing
from guard_client import HELLO, H2Peer, Peer, RawH2Peer, ask, serving
from hyperframe.frame import PingFrame

from aserve.server.guard.turns import Turns

pytestmark = pytest.mark.anyio

PING = PingFrame(0, opaque_data=b"12345678").serialize()


def test_share_of_the_loop() -> None:
    """Ten at once, each with a millisecond of work at a time: in 4 s they have had a third of that."""
    clock = trio.testing.MockClock()

    async def main() -> float:
        turns, worked = Turns(), 0.0

        async def noisy() -> None:
            nonlocal worked
            while True:
                clock.jump(0.001)  # the work
                worked += 0.001
                await turns.give_way(0.001)

        clock.autojump_threshold = 0.0
        with trio.move_on_after(4):
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(noisy)
        return worked

    assert trio.run(main, clock=clock) <= 1.4


def test_no_wait_is_without_bound() -> None:
    """A thousand before it, each with 100 ms of work: its turn comes within seconds."""
    clock = trio.testing.MockClock(autojump_threshold=0.0)

    async def main() -> float:
        turns = Turns()
        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                nursery.start_soon(turns.give_way, 0.1)
            began = trio.current_time()
        return trio.current_time() - began

    assert trio.run(main, clock=clock) <= 10


async def test_who_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that pings and pings, but none that asks and is answered, over either protocol."""
    waited: list[float] = []

    async def give_way(self: Turns, worked_s: float) -> None:
        waited.append(worked_s)

    monkeypatch.setattr(Turns, "give_way", give_way)
    async with serving(keep_alive_timeout=9) as running:
        assert await ask(running.port) == b"ok"
        polite = await H2Peer.connect(running.port)
        for _ in range(40):
            assert await polite.over(await polite.request("/raw?n=5&ms=0"))
        assert not waited
        noisy = await RawH2Peer.connect(running.port)
        await noisy.send(HELLO + PING * 50)
        await noisy.pump(lambda: len(noisy.of(6)) == 50)
        assert not waited
        await noisy.send(PING * 500)
        await noisy.pump(lambda: len(noisy.of(6)) == 550)
        assert waited and all(seconds >= 0 for seconds in waited)
        other = await Peer.connect(running.port)
        await other.get("/ok")
        assert await other.until(b"ok")
