"""Faults that are put in on purpose are found, each within a thousand seeds, and so are the ones that were found.

What a simulation says is worth what it would say of a program that is wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from aserve.core.errors import EngineDrainingError, GenerationError, QueueFullError
from aserve.core.request import FinishReason
from aserve.engine.bridge import EventRouter
from aserve.engine.engine import Engine
from aserve.engine.generation import Generation
from aserve.engine.lifecycle import Lifecycle
from aserve.engine.local_client import LocalClient
from aserve.scheduler import Scheduler
from aserve.server import request_scope
from aserve.server.request_counts import RequestCounts
from aserve.server.sse import CompletionFrames
from tests.simulation.host import ObservedCommands
from tests.simulation.runner import first_failure

SEEDS = range(1000)
Plant = Callable[[pytest.MonkeyPatch], None]


def abort_lost(patch):
    """A cancel is forgotten when the step loop has not even taken its request."""
    release = LocalClient.release

    def forgetful(self, request_ids):
        put, self._commands.put = self._commands.put, lambda command: None
        if not self._commands.untaken:
            self._commands.put = put
        try:
            release(self, request_ids)
        finally:
            self._commands.put = put

    patch.setattr(LocalClient, "release", forgetful)


def block_freed_early(patch):
    """Blocks do not wait for the step in flight that may still write them; slots do."""
    release = Scheduler._release

    def early(self, sequence):
        before = [len(step.fenced_blocks) for step in self._in_flight]
        release(self, sequence)
        for step, count in zip(self._in_flight, before, strict=True):
            while len(step.fenced_blocks) > count:
                held = step.fenced_blocks.pop()
                only_holder = sum(self.kv.pool.ref_count(block_id) == 1 for block_id in held)
                step.num_blocks_to_free -= only_holder
                self._num_fenced_blocks -= only_holder
                self.kv.release(held)

    patch.setattr(Scheduler, "_release", early)


def slot_and_blocks_freed_early(patch):
    release = Scheduler._release

    def early(self, sequence):
        in_flight, self._in_flight = self._in_flight, deque()
        release(self, sequence)
        self._in_flight = in_flight

    patch.setattr(Scheduler, "_release", early)


def event_after_the_terminal_one(patch):
    """The step in flight behind a sequence's end still tells of it."""
    commit = Scheduler.commit

    def talkative(self, result):
        ended = self.__dict__.setdefault("ended", [])
        events = commit(self, result)
        late = tuple(event._replace(finish_reason=None) for event in ended if self._in_flight)
        ended[:] = [event for event in events if event.finish_reason]
        return (*events, *late)

    patch.setattr(Scheduler, "commit", talkative)


def frame_after_the_terminal_one(patch):
    end = CompletionFrames.end
    patch.setattr(CompletionFrames, "end", lambda self: end(self) + b": keep-alive\n\n")


def mailbox_not_closed_on_death(patch):
    """One of several is overlooked."""

    def close_mailboxes(self, make_error):
        mailboxes = list(dict.fromkeys(self._routes.values()))
        for mailbox in mailboxes[1:] or mailboxes:
            mailbox.close(make_error())

    patch.setattr(EventRouter, "close_mailboxes", close_mailboxes)


def drain_that_forgets_a_queued_request(patch):
    """What runs is waited for, what waits for its turn is not."""

    async def wait_idle(self):
        while not self._client.is_idle and self.stats().num_running:
            await self._router.wait_report()

    async def wait_none_active(self):
        pass

    patch.setattr(Engine, "wait_idle", wait_idle)
    patch.setattr(RequestCounts, "wait_none_active", wait_none_active)


def command_overtaken(patch):
    """Commands are taken newest first: a cancel comes before its request."""
    take = ObservedCommands.take
    patch.setattr(ObservedCommands, "take", lambda self, *, block: take(self, block=block)[::-1])


def sends_are_cancelled(patch):
    """No grace: what ends a request is thrown into its send."""
    patch.setattr(request_scope, "GRACE_S", 0.0)


def death_is_not_remembered(patch):
    """After the engine's death requests are admitted, and wait for ever."""
    status = Lifecycle.status.fget
    patch.setattr(Lifecycle, "status", property(lambda self: "running" if self.failure else status(self)))


def called_full_while_it_ends(patch):
    """Found by seed 187 of an earlier form of the scenarios: a dead engine's queue was called full."""
    refuse = LocalClient._refuse_if_full

    def as_it_was(self, *args, **kwargs):
        try:
            refuse(self, *args, **kwargs)
        except EngineDrainingError:
            raise QueueFullError("as it was", retry_after_s=1.0) from None

    patch.setattr(LocalClient, "_refuse_if_full", as_it_was)


def error_behind_a_stop_string(patch):
    """Found by seed 2020: a step behind a stop string failed its request, if its event came with the match."""
    decode = Generation._decode

    def as_it_was(self, events):
        if any(event.finish_reason is FinishReason.ERROR for event in events):
            self.close(GenerationError("as it was"))
            return []
        return decode(self, events)

    patch.setattr(Generation, "_decode", as_it_was)


PLANTS: tuple[tuple[Plant, str], ...] = (
    (abort_lost, "run for nobody"),
    (block_freed_early, "at rest"),
    (slot_and_blocks_freed_early, "S2"),
    (event_after_the_terminal_one, "after its last one"),
    (frame_after_the_terminal_one, "after the last one"),
    (mailbox_not_closed_on_death, "hang"),
    (drain_that_forgets_a_queued_request, "engine_draining for no reason"),
    (command_overtaken, "run for nobody"),
    (sends_are_cancelled, "cancelled inside a send"),
    (death_is_not_remembered, "the engine has failed, and the routes say"),
    (called_full_while_it_ends, "for no reason"),
    (error_behind_a_stop_string, "generation_failed for no reason"),
)
RARE = (
    mailbox_not_closed_on_death,
    drain_that_forgets_a_queued_request,
    called_full_while_it_ends,
    error_behind_a_stop_string,
)


@pytest.mark.parametrize(
    ("plant", "symptom"),
    [pytest.param(*plant, marks=[pytest.mark.slow] * (plant[0] in RARE), id=plant[0].__name__) for plant in PLANTS],
)
def test_a_planted_fault_is_found(plant, symptom, monkeypatch):
    plant(monkeypatch)
    outcome = first_failure(SEEDS)
    assert outcome is not None, "not found"
    assert symptom in outcome.violation
