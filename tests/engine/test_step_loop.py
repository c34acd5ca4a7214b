"""The step loop, turned by hand: no thread and no event loop."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from aserve.core.errors import ModelLoadError
from aserve.core.request import FinishReason, Request, SamplingParams
from aserve.engine.messages import Cancel, Failed, Loaded, StepReport, Stop, Stopped, Submit
from aserve.engine.step_loop import Pause, StepLoop, run_steps
from aserve.scheduler import Scheduler
from aserve.testing import FakeExecutor


class Harness:
    """Commands and messages as lists; a clock that counts its readings."""

    def __init__(self, executor, scheduler=None):
        self.commands, self.messages, self.blocked = [], [], 0
        self.scheduler = scheduler or Scheduler(executor.capacity)
        self.now = 0.0
        self.loop = StepLoop(self.scheduler, executor, take=self.take, publish=self.messages.append, clock=self.clock)

    def clock(self):
        self.now += 1
        return self.now

    def take(self, *, block):
        self.blocked += block
        commands, self.commands = self.commands, []
        return commands

    def turn(self, *commands):
        self.commands += commands
        before = len(self.messages)
        assert self.loop.turn()
        return self.messages[before:]


def request(name="a-0", prompt=(1, 2, 3), max_tokens=4):
    return Request(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens))


def test_a_request_runs_to_its_end(capacity):
    harness = Harness(FakeExecutor(capacity))
    first = harness.turn(Submit((request(),)))
    assert [len(m.events) for m in first] == [0, 1]
    assert first[0].admitted == ("a-0",)
    assert first[0].scheduler.num_running == 1
    reports = [harness.turn()[0] for _ in range(3)]
    events = [e for m in [*first, *reports] for e in m.events]
    assert [e.finish_reason for e in events] == [None, None, None, FinishReason.LENGTH]
    assert reports[-1].scheduler.num_used_blocks == 0
    assert reports[-1].num_steps == 4
    assert reports[-1].num_commands == 1


def test_sleeps_only_without_work(capacity):
    harness = Harness(FakeExecutor(capacity))
    harness.turn(Submit((request(max_tokens=2),)))
    harness.turn()
    assert harness.blocked == 0
    assert harness.turn() == []  # finds nothing to do, and asks for commands without sleeping once more
    assert harness.blocked == 0
    harness.turn()
    assert harness.blocked == 1


def test_overlap_submits_two_steps_before_it_waits(capacity):
    calls = []

    class Recorded(FakeExecutor):
        def submit(self, plan):
            calls.append(f"submit {plan.step_id}")
            super().submit(plan)

        def wait(self):
            result = super().wait()
            calls.append(f"wait {result.step_id}")
            return result

    harness = Harness(Recorded(replace(capacity, max_in_flight=2)))
    harness.turn(Submit((request(max_tokens=3),)))
    harness.turn()
    harness.turn()
    assert calls == ["submit 0", "submit 1", "wait 0", "submit 2", "wait 1", "wait 2"]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_cancel_gives_its_blocks_back_and_says_so_though_nothing_else_runs(capacity, max_in_flight):
    harness = Harness(FakeExecutor(replace(capacity, max_in_flight=max_in_flight)))
    harness.turn(Submit((request(max_tokens=50),)))
    messages = harness.turn(Cancel(("a-0",)))
    messages += harness.turn()
    assert [e for m in messages for e in m.events] == []
    assert messages[-1].scheduler.num_running == 0
    assert messages[-1].scheduler.num_used_blocks == 0


def test_a_cancel_before_the_start_never_runs(capacity):
    harness = Harness(FakeExecutor(capacity))
    [report] = harness.turn(Submit((request(),)), Cancel(("a-0",)), Cancel(("a-0",)))
    assert report.num_commands == 3
    assert not report.scheduler.num_waiting
    assert report.num_steps == 0


def test_work_without_a_plan_is_a_failure_not_a_busy_loop(capacity):
    class Stuck(Scheduler):
        def plan(self):
            return None

    harness = Harness(FakeExecutor(capacity), Stuck(capacity))
    harness.commands = [Submit((request(),))]
    with pytest.raises(RuntimeError, match="S7"):
        harness.loop.turn()


def test_going_idle_checks_the_scheduler_every_time_at_a_cost_that_no_cache_size_changes(capacity, monkeypatch):
    looked_at = []
    harness = Harness(FakeExecutor(replace(capacity, num_blocks=100_000)))
    pool = harness.scheduler.kv.pool
    for name in ("ref_count", "is_free", "key"):
        monkeypatch.setattr(type(pool), name, lambda self, block_id: looked_at.append(block_id))
    for _ in range(3):
        harness.turn()
    assert not looked_at
    pool.allocate()  # a block that nobody will give back
    with pytest.raises(AssertionError, match="S10"):
        harness.turn()


def test_busy_and_waiting_time_are_counted_by_the_clock(capacity):
    harness = Harness(FakeExecutor(capacity))
    *_, last = harness.turn(Submit((request(max_tokens=3),))) + harness.turn()
    assert 0 < last.wait_s < harness.now
    assert last.busy_s > 0


def run(make_executor, capacity, *turns):
    """Messages and pauses of a whole thread life; one item of ``turns`` is taken per turn, then a stop."""
    messages, left, now = [], [*turns, [Stop()]], iter(range(10**6))
    moves = run_steps(
        make_executor, Scheduler, take=lambda block: left.pop(0), publish=messages.append, clock=lambda: next(now)
    )
    return messages, list(moves)


def test_a_whole_life(capacity):
    executor = FakeExecutor(capacity)
    messages, pauses = run(lambda: executor, capacity, [Submit((request(max_tokens=1),))], [])
    assert isinstance(messages[0], StepReport)
    assert messages[1] == Loaded(capacity)
    assert messages[-1] == Stopped()
    assert executor.closed
    assert not any(isinstance(m, Failed) for m in messages)
    assert pauses == [Pause.LOADING, Pause.TURN, Pause.DEVICE, Pause.TURN, Pause.COMMANDS]


def test_a_failure_while_loading_is_told_not_logged(capacity, caplog):
    error = ModelLoadError("no such model")

    def load():
        raise error

    assert run(load, capacity) == ([Failed(error), Stopped()], [Pause.LOADING])
    assert not caplog.records


@pytest.mark.parametrize("closing_fails", [False, True])
def test_a_failing_step_is_told_once_logged_once_and_closes_the_executor(capacity, caplog, closing_fails):
    closed = []

    class Closing(FakeExecutor):
        def close(self):
            closed.append(True)
            if closing_fails:
                raise OSError("cannot close")

    messages, _ = run(lambda: Closing(capacity, fail_at_step=1), capacity, [Submit((request(max_tokens=9),))], [], [])
    assert [type(m) for m in messages[-2:]] == [Failed, Stopped]
    assert sum(isinstance(m, Failed) for m in messages) == 1
    assert "injected failure" in str(messages[-2].error)
    assert closed == [True]
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1 + closing_fails
    assert "injected failure" in errors[0].exc_text


def test_a_failing_submission_is_a_failure_too(capacity):
    too_long = request(prompt=tuple(range(200)))
    messages, _ = run(lambda: FakeExecutor(capacity), capacity, [Submit((too_long,))])
    assert isinstance(messages[-2].error, AssertionError)


def test_a_life_that_is_given_up_between_two_moves_closes_the_executor_and_says_nothing(capacity, caplog):
    executor, messages = FakeExecutor(capacity), []
    moves = run_steps(lambda: executor, Scheduler, take=lambda block: [], publish=messages.append, clock=lambda: 0.0)
    for _ in range(3):
        next(moves)
    moves.close()
    assert executor.closed
    assert [type(m) for m in messages] == [StepReport, Loaded]
    assert not caplog.records
