"""Thousands of requests that end in every way at random moments leave nothing behind."""

from __future__ import annotations

import random
from functools import partial

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aserve.core.errors import AserveError, DeadlineExceededError, GenerationClosedError, QueueFullError
from aserve.scheduler import Scheduler, check

pytestmark = pytest.mark.anyio


async def use(generation, rng, outcomes):
    """Read a generation until its end, or leave it in one of the ways there are."""
    way = rng.choice(["read", "read", "leave", "close", "cancel", "error"])
    limit = rng.randrange(6)
    deltas = []
    try:
        async with generation:
            while way == "read" or len(deltas) < limit:
                if way == "cancel":
                    with anyio.move_on_after(rng.random() * 0.01):
                        deltas += await generation.next_deltas()
                    limit -= 1
                    continue
                new = await generation.next_deltas()
                if not new:
                    break
                deltas += new
            if way == "close":
                generation.close(DeadlineExceededError("too late"))
                await generation.next_deltas()
            if way == "error":
                raise GenerationClosedError("client left")
    except (DeadlineExceededError, GenerationClosedError):
        pass
    except QueueFullError:
        outcomes["full"] = outcomes.get("full", 0) + 1
        return
    ended = [d.choice for d in deltas if d.finish_reason]
    assert len(ended) == len(set(ended)), "two terminal events for one choice"
    if way == "read":
        assert len(ended) == generation.request.n
    outcomes[way] = outcomes.get(way, 0) + 1


async def storm(make_generation, num_tasks, num_requests, rng, outcomes):
    async def work():
        for _ in range(num_requests // num_tasks):
            await use(make_generation(), rng, outcomes)
            if rng.random() < 0.3:
                await anyio.sleep(rng.random() * 0.002)

    async with anyio.create_task_group() as tg:
        for _ in range(num_tasks):
            tg.start_soon(work)


def fields(rng):
    return {
        "prompt": bytes(rng.choices(b"abc", k=rng.randint(1, 40))),
        "max_tokens": rng.randint(1, 20),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "stop": rng.choice([(), (), ("a",), ("bc", "xy")]),
    }


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_a_storm_without_a_thread(manual, within, max_in_flight):
    """2,000 requests; the cache is small enough to preempt and the queue small enough to refuse."""
    rng = random.Random(max_in_flight)
    engine = manual(max_in_flight=max_in_flight, num_blocks=24, max_model_len=64, max_queue=12)
    outcomes, done = {}, anyio.Event()

    async def steps():
        while not done.is_set():
            engine.turn()
            await checkpoint()

    with within():
        async with anyio.create_task_group() as tg:
            tg.start_soon(steps)
            await storm(lambda: engine.generate(**fields(rng)), 25, 2000, rng, outcomes)
            done.set()
    await engine.assert_nothing_left()
    assert sum(outcomes.values()) == 2000
    assert set(outcomes) >= {"read", "leave", "close", "cancel", "error"}
    assert sum(engine.recorder.num_requests.values()) + outcomes.get("full", 0) == 2000


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_a_storm_with_the_thread(running, request_to, monkeypatch, within, max_in_flight):
    rng = random.Random(max_in_flight)
    schedulers, outcomes = [], {}

    def remember(*args, **kwargs):
        schedulers.append(Scheduler(*args, **kwargs))
        return schedulers[-1]

    monkeypatch.setattr("aserve.engine.new_scheduler.Scheduler", remember)
    with within():
        async with running(max_in_flight=max_in_flight, num_blocks=24, max_model_len=64, max_queue=12) as engine:
            make = partial(request_to, engine)
            await storm(lambda: engine.generate(make(**fields(rng))), 25, 2000, rng, outcomes)
            await engine.wait_idle()
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
            assert sum(stats.num_requests.values()) + outcomes.get("full", 0) == 2000
            assert stats.num_requests["error"] == 0
            assert engine.status == "running"
            client = engine._client
    assert client._router.num_unfinished == 0
    assert client._commands.take(block=False) == []
    assert not schedulers[0].has_work
    check(schedulers[0])


async def test_death_in_the_storm(running, request_to, within):
    """Every request ends, most with the one error, and the engine closes."""
    rng = random.Random(3)
    ended = []

    async def ask(engine):
        try:
            await use(engine.generate(request_to(engine, **fields(rng))), rng, {})
        except AserveError as error:
            ended.append(error.code)
        else:
            ended.append(None)

    with within():
        async with running(max_queue=400, step_s=0.001, fail_at_step=15) as engine:
            async with anyio.create_task_group() as tg:
                for _ in range(200):
                    tg.start_soon(ask, engine)
            assert engine.status == "dead"
            await engine.wait_idle()
    assert len(ended) == 200
    assert set(ended) == {None, "engine_dead"}
