"""The bridge: commands down, reports up, one wake-up per step, and no harm when the loop is gone."""

from __future__ import annotations

import threading

import anyio
import pytest

from aserve.core.errors import EngineDeadError, EngineDrainingError
from aserve.core.request import FinishReason
from aserve.core.step import TokenEvent
from aserve.engine.bridge import CommandQueue, EventRouter, StepThread
from aserve.engine.mailbox import Mailbox
from aserve.engine.messages import Cancel, Failed, Loaded, StepReport, Stop, Stopped
from aserve.engine.stats import StatsRecorder
from aserve.scheduler import SchedulerStats


def report(*events, admitted=(), num_steps=1, num_running=0):
    stats = SchedulerStats(*[0] * len(SchedulerStats._fields))._replace(num_running=num_running)
    return StepReport(tuple(events), admitted, stats, 0, num_steps, 0.0, 0.0)


def no_fault():
    raise AssertionError("a fault where none was expected")


def event(request_id, token_id, reason=None):
    return TokenEvent(request_id, token_id, None, reason, 0)


def test_commands_come_in_order_and_all_at_once():
    queue = CommandQueue()
    for command in (Cancel(("a",)), Cancel(("b",)), Stop()):
        queue.put(command)
    assert queue.take(block=True) == [Cancel(("a",)), Cancel(("b",)), Stop()]
    assert queue.take(block=False) == []
    assert queue.num_put == 3


def test_a_thread_that_has_nothing_to_do_sleeps_until_a_command():
    queue, taken = CommandQueue(), []
    thread = StepThread(lambda: taken.extend(queue.take(block=True)))
    thread.start()
    assert not thread.join(0.05)
    queue.put(Stop())
    assert thread.join(5)
    assert taken == [Stop()]


@pytest.mark.anyio
class TestEventRouter:
    async def test_events_go_to_their_mailbox(self, deliver_all):
        router = EventRouter(StatsRecorder(), lambda sign: None, no_fault)
        one, two = Mailbox(), Mailbox()
        router.register("a-0", one)
        router.register("b-0", two)
        router.publish(report(event("a-0", 1), event("b-0", 2), event("a-0", 3)))
        await deliver_all()
        assert [e.token_id for e in await one.take()] == [1, 3]
        assert [e.token_id for e in await two.take()] == [2]

    async def test_one_wake_up_for_all_that_was_published_before_the_loop_looks(self):
        router = EventRouter(StatsRecorder(), lambda sign: None, no_fault)
        wake_ups, schedule = [], router._call_soon
        router._call_soon = lambda callback: (wake_ups.append(1), schedule(callback))
        mailbox = Mailbox()
        router.register("a-0", mailbox)
        thread = threading.Thread(target=lambda: [router.publish(report(event("a-0", n))) for n in range(100)])
        thread.start()
        thread.join()
        assert len(wake_ups) == 1
        assert len(await mailbox.take()) == 100
        router.publish(report(event("a-0", 100)))
        assert len(wake_ups) == 2

    async def test_the_last_event_ends_the_registration(self, deliver_all):
        recorder = StatsRecorder()
        router = EventRouter(recorder, lambda sign: None, no_fault)
        router.register("a-0", Mailbox())
        router.publish(report(event("a-0", 1, FinishReason.LENGTH)))
        await deliver_all()
        assert router.num_unfinished == 0
        assert not router.unregister("a-0")

    async def test_late_events_are_dropped_and_counted(self, deliver_all):
        recorder = StatsRecorder()
        router = EventRouter(recorder, lambda sign: None, no_fault)
        mailbox = Mailbox()
        router.register("a-0", mailbox)
        assert router.unregister("a-0")
        router.publish(report(event("a-0", 1), event("never", 2), admitted=("a-0",)))
        await deliver_all()
        assert recorder.num_late_events == 2
        assert mailbox.last_s is None

    async def test_life_signs_are_told_in_order(self, deliver_all, capacity):
        signs = []
        router = EventRouter(StatsRecorder(), signs.append, no_fault)
        router.publish(Loaded(capacity))
        error = ValueError()
        router.publish(Failed(error))
        await deliver_all()
        assert signs == [Loaded(capacity), Failed(error)]

    async def test_death_closes_each_mailbox_once(self, deliver_all):
        router = EventRouter(StatsRecorder(), lambda sign: None, no_fault)
        mailbox = Mailbox()
        router.register("a-0", mailbox)
        router.register("a-1", mailbox)
        router.publish(Failed(ValueError("secret")))
        await deliver_all()
        with pytest.raises(EngineDeadError) as info:
            await mailbox.take()
        assert "secret" not in info.value.message
        assert router.num_unfinished == 0

    async def test_each_mailbox_gets_an_error_of_its_own(self):
        router = EventRouter(StatsRecorder(), lambda sign: None, no_fault)
        boxes = [Mailbox(), Mailbox()]
        for name, box in zip("ab", boxes, strict=True):
            router.register(name, box)
        router.close_all(lambda: EngineDrainingError("closing"))
        assert boxes[0].error is not boxes[1].error

    async def test_progress_is_a_step_or_an_empty_scheduler(self, deliver_all):
        router = EventRouter(StatsRecorder(), lambda sign: None, no_fault)

        async def progress_after(message):
            await anyio.sleep(0.01)
            before = router.progress_s
            router.publish(message)
            await deliver_all()
            return router.progress_s > before

        assert await progress_after(report(num_steps=1, num_running=1))
        assert not await progress_after(report(num_steps=1, num_running=1))  # numbers only
        assert await progress_after(report(num_steps=2, num_running=1))
        assert await progress_after(report(num_steps=2))

    async def test_coming_and_going_is_no_progress(self):
        router = EventRouter(StatsRecorder(), lambda sign: None, no_fault)
        start = router.progress_s
        await anyio.sleep(0.01)
        router.register("a-0", Mailbox())
        router.unregister("a-0")
        assert router.progress_s == start

    async def test_closing_the_mailboxes_leaves_the_cancelling_to_their_readers(self):
        router = EventRouter(StatsRecorder(), lambda sign: None, no_fault)
        one, two = Mailbox(), Mailbox()
        for name, box in (("a-0", one), ("a-1", one), ("b-0", two)):
            router.register(name, box)
        router.close_mailboxes(lambda: EngineDrainingError("too late"))
        assert one.error is not two.error
        assert router.num_unfinished == 3

    async def test_a_closed_router_takes_no_more(self, deliver_all):
        recorder = StatsRecorder()
        router = EventRouter(recorder, lambda sign: None, no_fault)
        router.close()
        router.publish(report(event("a-0", 1)))
        await deliver_all()
        assert recorder.num_late_events == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_publishing_to_a_loop_that_is_gone_does_nothing(backend):
    routers = []

    async def main():
        routers.append(EventRouter(StatsRecorder(), lambda sign: None, no_fault))

    anyio.run(main, backend=backend)
    for _ in range(3):
        routers[0].publish(report(event("a-0", 1)))
        routers[0].call_soon(lambda: None)
    assert not routers[0]._messages


@pytest.mark.anyio
async def test_a_fault_in_the_delivery_ends_the_requests_instead_of_hanging_them(deliver_all, caplog):
    signs, faults, recorder = [], [], StatsRecorder()
    router = EventRouter(recorder, signs.append, lambda: faults.append(1))
    mailbox = Mailbox()
    router.register("a-0", mailbox)
    router.publish(report("no event"))
    router.publish(report("no event"))
    router.publish(report(event("late-0", 1)))
    router.publish(Stopped())
    await deliver_all()
    assert [type(sign) for sign in signs] == [Failed, Stopped]
    assert faults == [1], "the thread is told to stop, once"
    with pytest.raises(EngineDeadError):
        await mailbox.take()
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert recorder.num_late_events == 0
