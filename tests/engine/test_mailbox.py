"""The mailbox loses nothing, wakes its reader, and ends with the first reason."""

from __future__ import annotations

import anyio
import pytest

from aserve.core.errors import DeadlineExceededError, GenerationClosedError
from aserve.core.step import TokenEvent
from aserve.engine.mailbox import Mailbox

pytestmark = pytest.mark.anyio


def event(token_id):
    return TokenEvent("a-0", token_id, None, None, 0)


async def test_everything_that_is_there_comes_at_once():
    mailbox = Mailbox()
    mailbox.put(event(1), 5.0)
    mailbox.put(event(2), 6.0)
    assert [e.token_id for e in await mailbox.take()] == [1, 2]
    assert mailbox.last_s == 6.0


async def test_a_cancelled_wait_loses_nothing():
    mailbox = Mailbox()
    with anyio.move_on_after(0):
        await mailbox.take()
    with anyio.CancelScope() as scope:
        scope.cancel()
        mailbox.put(event(1), 0.0)
        await anyio.sleep(1)
    assert [e.token_id for e in await mailbox.take()] == [1]


async def test_the_reader_wakes_for_each_batch(within):
    mailbox, seen = Mailbox(), []

    async def read():
        while len(seen) < 3:
            seen.extend(e.token_id for e in await mailbox.take())

    with within():
        async with anyio.create_task_group() as tg:
            tg.start_soon(read)
            for n in range(3):
                await anyio.wait_all_tasks_blocked()
                mailbox.put(event(n), 0.0)
    assert seen == [0, 1, 2]


async def test_closing_wakes_the_reader(within):
    mailbox = Mailbox()

    async def close():
        await anyio.wait_all_tasks_blocked()
        mailbox.close(DeadlineExceededError("late"))

    with within():
        async with anyio.create_task_group() as tg:
            tg.start_soon(close)
            with pytest.raises(DeadlineExceededError, match="late"):
                await mailbox.take()


async def test_what_was_not_read_before_the_closing_is_dropped():
    mailbox = Mailbox()
    mailbox.put(event(1), 0.0)
    mailbox.close(GenerationClosedError("gone"))
    with pytest.raises(GenerationClosedError):
        await mailbox.take()


async def test_the_first_reason_counts_for_every_read():
    mailbox = Mailbox()
    mailbox.close(DeadlineExceededError("first"))
    mailbox.close(GenerationClosedError("second"))
    for _ in range(2):
        with pytest.raises(DeadlineExceededError, match="first"):
            await mailbox.take()
