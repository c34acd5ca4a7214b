"""What is foreseen is the wait that comes, where answers run to their limit; what would wait longer is refused."""

from __future__ import annotations

import pytest

from aserve.core.errors import QueueFullError
from aserve.core.step import TokenEvent
from aserve.engine.mailbox import Mailbox
from aserve.engine.messages import StepReport
from aserve.engine.place_forecast import PlaceForecast
from aserve.scheduler import SchedulerStats

STEP_S = 0.5


class Course:
    """A forecast, and what happened to the requests that it follows."""

    def __init__(self):
        self.forecast = PlaceForecast()
        self._num_steps = 0

    def enter(self, max_tokens, *, num_choices=1, num_done=None):
        """A request that waits, or one that runs and has so many tokens per choice."""
        mailbox = Mailbox()
        mailbox.num_registered = num_choices
        self.forecast.enter(mailbox, num_choices=num_choices, max_tokens=max_tokens, num_unfinished=num_choices)
        if num_done is not None:
            mailbox.admit(0.0)
            for _ in range(num_done * num_choices):
                mailbox.put(TokenEvent("x", 1, None, None, 0), 0.0)
        return mailbox

    def end(self, mailbox):
        mailbox.num_registered = 0

    def wait_s(self, *, num_new=1, num_unknown=0, num_places=2):
        self._num_steps += 10
        report = StepReport(
            (), (), SchedulerStats(0, 0, 0, 0, 0, 0, 0), 0, self._num_steps, self._num_steps * STEP_S, 0.0
        )
        return self.forecast.wait_s(report, num_places=num_places, num_new=num_new, num_unknown=num_unknown)


@pytest.fixture
def course():
    return Course()


@pytest.fixture
def used(course):
    """One that has seen an answer use all of its limit."""
    course.end(course.enter(4, num_done=4))
    return course


def test_nothing_is_foreseen_before_an_answer_has_ended(course):
    for _ in range(2):
        course.enter(100, num_done=1)
    course.enter(100)
    assert course.wait_s() == 0


def test_the_first_place_that_becomes_free(used):
    used.enter(10, num_done=4)
    used.enter(10, num_done=7)
    assert used.wait_s() == 3 * STEP_S
    assert used.wait_s(num_new=2) == 6 * STEP_S
    assert used.wait_s(num_places=3) == 0, "one is free already"


def test_those_ahead_take_the_places_before(used):
    used.enter(10, num_done=4)
    used.enter(10, num_done=7)
    used.enter(2)
    assert used.wait_s() == 5 * STEP_S, "three steps until it begins, and two that it takes"
    used.enter(20)
    assert used.wait_s() == 6 * STEP_S


def test_what_is_still_prepared_stands_ahead_too(used):
    used.enter(10, num_done=4)
    used.enter(10, num_done=7)
    assert used.wait_s(num_unknown=1) > used.wait_s()


def test_choices_take_a_place_each(used):
    used.enter(10, num_choices=2, num_done=5)
    assert used.wait_s() == 5 * STEP_S
    used.enter(6, num_choices=2)
    assert used.wait_s() == 11 * STEP_S


def test_answers_that_end_early_make_the_wait_shorter(course):
    for _ in range(3):
        course.end(course.enter(100, num_done=25))
    course.enter(100, num_done=5)
    course.enter(100, num_done=5)
    assert course.wait_s() == 20 * STEP_S


def test_one_that_was_given_up_says_nothing_about_lengths(used):
    given_up = used.enter(1000, num_done=1)
    given_up.close(QueueFullError("for a reason"))
    used.end(given_up)
    used.enter(10, num_done=4)
    used.enter(10, num_done=4)
    assert used.wait_s() == 6 * STEP_S


def test_what_has_ended_is_forgotten_without_being_asked(used):
    for _ in range(1000):
        used.end(used.enter(10, num_done=1))
    assert len(used.forecast._courses) < 100


@pytest.mark.anyio
class TestAdmission:
    async def _run(self, engine, *, max_tokens, number=4):
        """So many requests to their ends."""
        generations = [engine.generate(max_tokens=max_tokens) for _ in range(number)]
        for generation in generations:
            await generation.__aenter__()
        await engine.step(max_tokens + 2)
        for generation in generations:
            while await generation.next_deltas():
                pass
            generation.leave()

    async def test_what_would_wait_too_long_is_refused(self, manual):
        engine = manual(max_wait_s=0.0)
        await self._run(engine, max_tokens=10)
        running = [engine.generate(max_tokens=10) for _ in range(4)]
        for generation in running:
            await generation.__aenter__()
        await engine.step()
        with pytest.raises(QueueFullError, match="would wait for about") as info:
            await engine.generate().__aenter__()
        assert info.value.retry_after_s >= 1
        assert engine.recorder.num_rejected == 1
        running[0].leave()
        await engine.step()
        await engine.generate().__aenter__()

    async def test_what_would_not_is_let_in(self, manual):
        engine = manual(max_wait_s=10_000.0)
        await self._run(engine, max_tokens=10)
        for _ in range(20):
            await engine.generate(max_tokens=10).__aenter__()
            await engine.step()

    async def test_until_something_is_known_only_the_numbers_count(self, manual):
        engine = manual(max_wait_s=0.0, max_queue=3)
        for _ in range(4 + 3):
            await engine.generate().__aenter__()
        with pytest.raises(QueueFullError, match="3 requests wait already"):
            await engine.generate().__aenter__()
