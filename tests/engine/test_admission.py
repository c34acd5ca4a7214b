"""Who may enter: the queue's bound, also in a burst between two steps, and the capacity formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aserve.core.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineDrainingError,
    InvalidRequestError,
    QueueFullError,
)
from aserve.engine.admission import fit, num_too_many
from aserve.engine.drain_rate import DrainRate
from aserve.engine.generation import submit_together
from aserve.engine.sequences import choice_seed, expand
from aserve.scheduler import SchedulerStats


async def enter(engine, **fields):
    generation = engine.generate(**fields)
    await generation.__aenter__()
    return generation


async def fill(engine, limit=1000, **fields):
    """Enter requests until one is refused; returns those that were let in, and the refusal."""
    entered = []
    for _ in range(limit):
        try:
            entered.append(await enter(engine, **fields))
        except QueueFullError as error:
            return entered, error
    raise AssertionError("nobody was refused")


@pytest.mark.anyio
class TestQueueBound:
    async def test_a_burst_on_an_idle_engine(self, manual):
        engine = manual(max_queue=3)
        entered, error = await fill(engine)
        assert len(entered) == 4 + 3
        assert error.status == 503
        assert error.retry_after_s >= 1
        await engine.step()
        stats = engine.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (4, 3)
        for generation in entered:
            generation.leave()
        await engine.assert_nothing_left()
        assert engine.recorder.num_rejected == 1

    async def test_a_burst_between_two_steps_of_a_busy_engine(self, manual):
        engine = manual(max_queue=3)
        for _ in range(4):
            await enter(engine, max_tokens=50)
        await engine.step(2)
        entered, _ = await fill(engine)
        assert len(entered) == 3
        await engine.step()
        assert engine.scheduler.stats().num_waiting == 3
        with pytest.raises(QueueFullError):
            await enter(engine)

    async def test_choices_count_each(self, manual):
        engine = manual(max_queue=3)
        await enter(engine, n=4)
        await enter(engine, n=2)
        with pytest.raises(QueueFullError):
            await enter(engine, n=2)
        await enter(engine, n=1)

    async def test_no_queue_at_all_still_lets_the_batch_fill(self, manual):
        engine = manual(max_queue=0)
        entered, _ = await fill(engine, max_tokens=3)
        assert len(entered) == 4
        await engine.step(4)
        assert len((await fill(engine))[0]) == 4

    async def test_places_that_the_cache_cannot_fill_do_not_count(self, manual):
        """The cache holds two prompts of 30 tokens, whatever the number of slots."""
        engine = manual(max_queue=2, num_blocks=20, max_model_len=64)
        entered, _ = await fill(engine, prompt=b"a" * 30)
        assert len(entered) == 2 + 2

    async def test_an_idle_engine_refuses_nobody(self, manual):
        engine = manual(max_queue=0, num_blocks=20, max_model_len=64)
        await enter(engine, prompt=b"a" * 30, n=4)

    async def test_a_unit_is_admitted_as_one_or_not_at_all(self, manual):
        engine = manual(max_queue=1)
        await enter(engine)
        group = [engine.generate(max_tokens=3) for _ in range(5)]
        with pytest.raises(QueueFullError):
            await submit_together(group, engine.client)
        assert engine.router.num_unfinished == 1, "nothing of it was registered"
        await submit_together([engine.generate() for _ in range(4)], engine.client)
        await engine.step()
        stats = engine.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (4, 1)

    async def test_a_unit_of_which_the_cache_holds_a_part_runs_on_an_idle_engine(self, manual):
        """One by one the third prompt would be refused behind the first two, every time."""
        engine = manual(max_queue=0, num_blocks=20, max_model_len=64)
        group = [engine.generate(prompt=b"a" * 30, max_tokens=2) for _ in range(4)]
        await submit_together(group, engine.client)
        for _ in range(20):
            await engine.step()
        assert engine.router.num_unfinished == 0
        for generation in group:
            generation.leave()
        await engine.assert_nothing_left()

    async def test_a_unit_with_a_wrong_member_leaves_nothing(self, manual):
        engine = manual()
        with pytest.raises(ContextLengthError):
            await submit_together([engine.generate(), engine.generate(max_tokens=10**6)], engine.client)
        same = engine.request()
        with pytest.raises(InvalidRequestError, match="running already"):
            await submit_together([engine.generate(same), engine.generate(same)], engine.client)
        assert engine.router.num_unfinished == engine.client.num_waiting_tokens == engine.commands.num_put == 0

    async def test_a_unit_that_cannot_be_opened_is_taken_back_whole(self, manual, monkeypatch):
        engine = manual()
        group = [engine.generate() for _ in range(3)]
        monkeypatch.setattr(group[1], "open", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await submit_together(group, engine.client)
        await engine.assert_nothing_left()
        assert engine.client.num_waiting_tokens == 0
        assert sum(engine.recorder.num_requests.values()) == 0

    async def test_a_full_queue_that_will_not_drain_is_not_called_full(self, manual, deliver_all):
        """A request whose prompt is being prepared while the engine dies, or begins to drain, is to hear of that."""
        engine = manual(max_queue=0, max_num_seqs=1)
        async with engine.generate(max_tokens=50):
            await engine.step()
            with pytest.raises(QueueFullError), engine.client.preparing(1):
                raise AssertionError("let in")
            engine.lifecycle.start_draining(5.0)
            with pytest.raises(EngineDrainingError), engine.client.preparing(1):
                raise AssertionError("let in")
            engine.fail(RuntimeError("injected"))
            await deliver_all()
            with pytest.raises(EngineDeadError), engine.client.preparing(1):
                raise AssertionError("let in")
        assert engine.recorder.num_rejected == 1

    async def test_waiting_prompt_tokens_are_bounded_too(self, manual):
        engine = manual(max_queue=100, max_queue_tokens=50)
        for _ in range(4):
            await enter(engine, max_tokens=50)
        await engine.step()
        assert engine.client.num_waiting_tokens == 0, "what runs does not wait"
        entered, error = await fill(engine, prompt=b"a" * 20)
        assert len(entered) == 2
        assert engine.client.num_waiting_tokens == 40
        assert "40 prompt tokens wait" in error.message
        assert error.retry_after_s >= 1
        await enter(engine, prompt=b"a" * 10)
        entered[0].leave()
        assert engine.client.num_waiting_tokens == 30

    async def test_prompts_that_can_run_at_once_do_not_wait(self, manual):
        engine = manual(max_queue_tokens=41)
        entered, error = await fill(engine, prompt=b"a" * 20)
        assert len(entered) == 4 + 2, "the batch, and two that wait"
        assert "40 prompt tokens wait" in error.message
        for generation in entered:
            generation.leave()
        await engine.assert_nothing_left()

    async def test_nor_can_more_run_at_once_than_the_cache_holds(self, manual):
        engine = manual(max_queue_tokens=60, num_blocks=20, max_model_len=64)
        entered, _ = await fill(engine, prompt=b"a" * 30)
        assert len(entered) == 2 + 2

    async def test_what_is_prepared_waits_in_the_queue(self, manual):
        engine = manual(max_queue=3)
        client = engine.client
        with client.preparing(4), client.preparing(2):
            with pytest.raises(QueueFullError), client.preparing(2):
                raise AssertionError("let in")
            with client.preparing(1):
                await enter(engine)  # what is admitted has been counted before
        with client.preparing(6), pytest.raises(QueueFullError), client.preparing(1):
            raise AssertionError("let in")
        assert engine.recorder.num_rejected == 2

    async def test_one_prompt_above_the_bound_may_wait_alone(self, manual):
        engine = manual(max_queue_tokens=5, max_num_seqs=1)
        await enter(engine)
        await engine.step()
        waiting = await enter(engine, prompt=b"a" * 20, n=2)
        assert engine.client.num_waiting_tokens == 20, "choices share their prompt"
        with pytest.raises(QueueFullError):
            await enter(engine)
        waiting.leave()
        assert engine.client.num_waiting_tokens == 0

    async def test_leaving_makes_room_at_once(self, manual):
        engine = manual(max_queue=1)
        entered, _ = await fill(engine)
        entered[-1].leave()
        await enter(engine)
        with pytest.raises(QueueFullError):
            await enter(engine)

    async def test_requests_that_come_and_go_within_one_step_are_bounded_too(self, manual):
        engine = manual(max_queue=5)
        num_entered = 0

        async def come_and_go():
            nonlocal num_entered
            while num_entered < 10_000:
                (await enter(engine)).leave()
                num_entered += 1

        with pytest.raises(QueueFullError):
            await come_and_go()
        assert 0 < num_entered <= 20
        await engine.step()
        await enter(engine)

    async def test_the_time_to_retry_follows_the_rate_of_completions(self, manual):
        engine = manual()
        rate = engine.recorder.drain_rate
        assert rate.wait_s(10, 0.0) == 1
        rate.begin(0.0)
        for n in range(1, 21):
            engine.recorder.note_events(1, 0, 1, n * 2.0)
        assert rate.wait_s(5, 40.0) == 10
        assert rate.wait_s(1000, 40.0) == 60
        assert rate.wait_s(1, 20 * 0.001) >= 1

    @pytest.mark.parametrize("num_rounds", [1, 3, 100])
    async def test_ends_that_come_together_took_the_time_before_them(self, num_rounds):
        """A batch of 256 equal requests ends in one step, every 20 s; 500 take 39 s or two rounds more."""
        rate = DrainRate()
        rate.begin(0.0)
        for number in range(1, num_rounds + 1):
            rate.note(256, number * 20.0)
        for later_s in (0.0, 0.01, 5.0, 10.0, 19.9):
            assert 39 <= rate.wait_s(500, num_rounds * 20.0 + later_s) <= 60, later_s

    async def test_an_idle_hour_is_no_slow_hour(self):
        rate = DrainRate()
        rate.begin(0.0)
        rate.note(10, 5.0)
        rate.begin(3600.0)
        assert rate.wait_s(20, 3600.1) == 10, "the rate before it"
        rate.note(1, 3601.0)
        assert rate.wait_s(20, 3602.0) == 40, "and the rate since"


def test_what_fits(capacity):
    assert fit(capacity, 100, 10) == 10
    assert fit(capacity, 100, 50) == 28
    assert fit(capacity, 127, None) == 1


@pytest.mark.parametrize("changes", [{}, {"max_model_len": 999, "num_blocks": 32}])
@pytest.mark.parametrize("num_prompt_tokens", [128, 5000])
def test_what_does_not_fit_is_told_with_both_numbers(capacity, changes, num_prompt_tokens):
    with pytest.raises(ContextLengthError) as info:
        fit(replace(capacity, **changes), num_prompt_tokens, 5, param="messages")
    message = info.value.message
    assert "128" in message
    assert str(num_prompt_tokens) in message
    assert "-" not in message
    assert info.value.param == "messages"
    assert ("cache" in message) == bool(changes)


def test_waiting_sequences_take_the_free_places_first(capacity):
    nothing = SchedulerStats(*[0] * len(SchedulerStats._fields))
    stats = nothing._replace(num_running=1, num_waiting=1, num_used_blocks=4, num_blocks=64)
    free = replace_waiting(stats, 0)
    asked = {"max_queue": 1, "num_unfinished": 2, "num_new": 1, "num_prompt_tokens": 3}
    assert num_too_many(stats, capacity, **asked) == 1
    assert num_too_many(free, capacity, **asked) < 0


def replace_waiting(stats, num_waiting):
    return stats._replace(num_waiting=num_waiting)


def test_seeds_of_choices():
    assert choice_seed(7, 0) == 7
    seeds = [choice_seed(s, c) for s in (0, 1, 7, 8, 2**64 - 1) for c in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**64 for s in seeds)
    assert choice_seed(7, 1) == choice_seed(7, 1)


@pytest.mark.anyio
async def test_a_request_becomes_sequences_in_order(manual):
    request = manual().request(n=3, priority=2, cache_salt=b"x")
    sequences = expand(request, 10)
    assert [s.request_id for s in sequences] == [f"{request.request_id}-{i}" for i in range(3)]
    assert [s.arrival_index for s in sequences] == [10, 11, 12]
    assert {(s.priority, s.cache_salt, s.prompt_token_ids) for s in sequences} == {(2, b"x", (97, 98, 99))}
