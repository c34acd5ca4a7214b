"""What must hold after every event, at rest, and at the end; from outside the parts, over all of them together.

The scheduler's own invariants are ``aserve.scheduler.check``; here is what binds scheduler, queue, router and routes.
Reads private state on purpose. Called by the world.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from aserve.core.request import RequestId
from aserve.core.step import StepPlan, TokenEvent
from aserve.engine.bridge import EventRouter
from aserve.engine.messages import Cancel, Stop, Submit
from aserve.scheduler import Scheduler, check
from aserve.scheduler.invariants import check_plan
from aserve.server.admin import Admin

if TYPE_CHECKING:
    from tests.simulation.world import World

SETTLED_S = 5.0


class Observer:
    """Looks at one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended: set[RequestId] = set()
        self._was_ready = False
        self._left: dict[RequestId, int] = {}
        self.open_requests: set[int] = set()

    # -- after every event

    def look(self, *, moved: bool) -> None:
        """After an event; only moves of the step loop change the scheduler."""
        world = self._world
        scheduler, engine = world.scheduler, world.engine
        if scheduler is None or engine is None:
            return
        router = engine._router
        if router.num_unfinished or engine._client._num_preparing:  # those whose prompts are made count as waiting
            world.busy_s = world.clock.now_s
        if world.failed_s is not None:
            return  # nothing runs any more
        if moved:
            try:
                check(scheduler)
            except AssertionError as error:
                world.expect(False, str(error))
        self._look_at_ids(scheduler, router)

    def look_at_plan(self, plan: StepPlan) -> None:
        assert self._world.scheduler is not None
        try:
            check_plan(self._world.scheduler, plan)
        except AssertionError as error:
            self._world.expect(False, str(error))

    def note_events(self, events: Sequence[TokenEvent]) -> None:
        """What a commit brings: one terminal event per sequence, and nothing after it."""
        world = self._world
        for event in events:
            world.expect(event.request_id not in self._ended, f"an event of {event.request_id} after its last one")
            if event.finish_reason is not None:
                self._ended.add(event.request_id)
        if events:
            world.log("tokens", *(event.token_id for event in events))

    def _look_at_ids(self, scheduler: Scheduler, router: EventRouter) -> None:
        """Who runs is wanted, or being cancelled; who is wanted runs, or its last event is on its way."""
        world = self._world
        assert world.host is not None
        untaken = world.host.commands.untaken
        submitted, cancelled, stops = set[RequestId](), set[RequestId](), False
        for command in untaken:
            match command:
                case Submit(requests):
                    submitted.update(request.request_id for request in requests)
                case Cancel(request_ids):
                    cancelled.update(request_ids)
                case Stop():
                    stops = True
        if router.is_closed or stops or engine_is_closed(world):
            return
        live, wanted = scheduler._live.keys(), router._routes.keys()
        orphans = live - wanted - cancelled
        world.expect(not orphans, f"{sorted(orphans)} run for nobody, and no cancel is on its way")
        lost = wanted - live - submitted - self._ended
        world.expect(not lost, f"{sorted(lost)} are waited for and do not run")

    # -- the health routes

    def look_at_health(self) -> None:
        """Both say what the engine's state is, and readiness never comes back once it is lost to an end."""
        world = self._world
        app = world.server and world.server.app
        if app is None:
            return
        admin: Admin = app._small._admin
        health, ready = admin.health(), admin.ready()
        states = [json.loads(reply.body)["status"] for reply in (health, ready)]
        world.log("health", *states)
        now_s = world.clock.now_s
        world.expect(
            (health.status, ready.status) in ((200, 200), (200, 503), (503, 503)), f"health and ready: {states}"
        )
        for reply, state in zip((health, ready), states, strict=True):
            world.expect((reply.status == 200) == (state == "ok"), f"{state} with status {reply.status}")
        settled_s = now_s - 0.1 - world.paused_s
        if world.failed_s is not None and world.failed_s < settled_s:
            world.expect("ok" not in states, f"the engine has failed, and the routes say {states}")
        if world.stopping_s is not None and world.stopping_s < settled_s:
            world.expect(states[1] != "ok", "ready while the program ends")
        undisturbed = world.failed_s is None and world.stopping_s is None
        if undisturbed and world.engine is not None and not (world.slowed_s or world.paused_s or world.hangs):
            world.expect(states == ["ok", "ok"], f"nothing is wrong, and the routes say {states}")

    # -- at rest and at the end

    async def look_at_rest(self) -> None:
        """Once every client has left, a running engine soon holds nothing."""
        world = self._world
        engine, scheduler = world.engine, world.scheduler
        if engine is None or scheduler is None or world.failed_s is not None or world.stopping_s is not None:
            return
        if world.hangs:
            return
        with trio.move_on_after(SETTLED_S + 5 * world.scenario.faults.slow_s) as limit:
            while not engine._client.is_idle:  # not by the engine's own means: those are on trial
                await trio.sleep(0.01)
        if world.hangs or world.failed_s is not None or world.stopping_s is not None:
            return
        world.expect(not limit.cancelled_caught, "the engine does not come to rest")
        stats = engine.stats()
        numbers = (stats.num_running, stats.num_waiting, stats.num_used_blocks)
        world.expect(numbers == (0, 0, 0), f"running, waiting, blocks at rest: {numbers}")
        world.expect(not scheduler.has_work, "the scheduler has work at rest")
        check(scheduler)
        world.expect(not engine._router.num_unfinished, "somebody is registered at rest")
        self.look_at_health()

    def look_at_end(self) -> None:
        """After the program's end nobody is registered, no request is open, and each was counted once."""
        world = self._world
        if world.engine is not None:
            world.expect(not world.engine._router._routes, "somebody is registered at the end")
        world.expect(not self.open_requests, f"requests {self.open_requests} are open at the end")
        if world.server is None:
            return
        counts = world.server.app.counts
        world.expect(counts.num_active == 0, f"{counts.num_active} requests are active at the end")
        total = sum(counts.totals.values())
        world.expect(total == world.num_served, f"{total} requests counted, {world.num_served} served")


def engine_is_closed(world: World) -> bool:
    """Whether the engine's scope is being left."""
    return world.engine is not None and world.engine.status == "closed"
