"""The request scope alone, in virtual time: deadlines, keep-alives, stuck clients, cancellation from outside."""

from __future__ import annotations

import anyio
import pytest
from trio.testing import MockClock

from aserve.core.errors import DeadlineExceededError, GenerationClosedError
from aserve.server.asgi import RequestHead
from aserve.server.deadlines import Deadlines, TimeLimits
from aserve.server.reply import Reply
from aserve.server.request_scope import RequestScope

pytestmark = pytest.mark.anyio

HEAD = RequestHead(method="POST", path="/x", headers=[], http_version="1.1", request_id="r")


@pytest.fixture(params=["virtual"])
def anyio_backend(request):
    return "trio", {"clock": MockClock(autojump_threshold=0)}


class Work:
    """A generation that never says anything, and what became of it."""

    has_arrived = False

    def __init__(self):
        self.begun_s = self.last_token_s = None
        self.closed = anyio.Event()
        self.error = None
        self.has_left = False
        self.left_s = None

    def when_begun(self, callback):
        """It never begins."""

    def close(self, error):
        self.error = error
        self.closed.set()

    def leave(self):
        assert self.error is not None, "the reason comes first"
        self.has_left = True

    async def __call__(self, scope):
        scope.attach(self)
        await scope.start_stream()
        await self.closed.wait()
        if not scope.gone:
            await scope.out.write(b"error", last=True)
        self.left_s = anyio.current_time()


def make_scope(exchange, **options):
    limits = TimeLimits(**{name: options.pop(name) for name in ("total_s", "queue_s", "idle_s") if name in options})
    settings = {"stall_s": 30.0, "keepalive_s": 0.0} | options
    deadlines = Deadlines(limits, anyio.current_time(), retry_after_s=lambda: 7.0)
    return RequestScope(HEAD, exchange.receive, exchange.send, deadlines=deadlines, **settings)


async def test_the_deadline_closes_and_the_end_is_still_sent(make_exchange):
    exchange, work = make_exchange(), Work()
    await make_scope(exchange, total_s=100.0).run(work)
    assert isinstance(work.error, DeadlineExceededError)
    assert work.left_s == pytest.approx(100.0)
    assert exchange.answer.body == b"error"
    assert exchange.bookkeeping_done


async def test_silence_is_filled_with_comments(make_exchange):
    exchange, work = make_exchange(), Work()
    await make_scope(exchange, total_s=100.0, keepalive_s=15.0).run(work)
    assert exchange.answer.body == b": keep-alive\n\n" * 6 + b"error"


async def test_no_comments_while_there_is_something_to_say(make_exchange):
    exchange = make_exchange()

    async def work(scope):
        await scope.start_stream()
        for _ in range(10):
            await anyio.sleep(10)
            await scope.out.write(b"x")
        await scope.out.write(b"", last=True)

    await make_scope(exchange, keepalive_s=15.0).run(work)
    assert exchange.answer.body == b"x" * 10


async def test_comments_and_chunks_never_overlap(make_exchange):
    async def slow(exchange, message):
        await anyio.sleep(7)

    exchange = make_exchange(on_send=slow)  # it asserts that sends do not overlap

    async def work(scope):
        await scope.start_stream()
        for _ in range(20):
            await anyio.sleep(11)
            await scope.out.write(b"x")
        await scope.out.write(b"", last=True)

    await make_scope(exchange, keepalive_s=10.0).run(work)
    assert exchange.answer.body.count(b"x") == 20
    assert exchange.answer.body.count(b": keep-alive") > 5


async def test_a_client_that_leaves_ends_the_request_at_once(make_exchange):
    exchange, work = make_exchange(), Work()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(make_scope(exchange).run, work)
        await anyio.sleep(5)
        exchange.disconnect()
    assert isinstance(work.error, GenerationClosedError)
    assert work.left_s == pytest.approx(5.0)


@pytest.mark.parametrize("stuck_at", ["write", "ping"])
async def test_a_client_that_does_not_read_is_given_up(make_exchange, stuck_at):
    async def stick(exchange, message):
        if message.get("body"):
            await anyio.sleep_forever()

    exchange, work = make_exchange(on_send=stick), Work()
    closed_s = None

    async def sending(scope):
        nonlocal closed_s
        scope.attach(work)
        await scope.start_stream()
        try:
            if stuck_at == "write":
                await scope.out.write(b"x")
            else:
                await work.closed.wait()
                closed_s = anyio.current_time()
                await scope.out.write(b"x")
        finally:
            work.left_s = anyio.current_time()

    keepalive_s = 10.0 if stuck_at == "ping" else 0.0
    await make_scope(exchange, stall_s=30.0, keepalive_s=keepalive_s).run(sending)
    assert isinstance(work.error, GenerationClosedError)
    assert 30 <= work.left_s <= 50
    if stuck_at == "ping":
        assert 39 <= closed_s <= 49


async def test_a_send_that_is_slow_but_moves_is_no_stall(make_exchange):
    async def slow(exchange, message):
        await anyio.sleep(25)

    exchange = make_exchange(on_send=slow)

    async def work(scope):
        await scope.start_stream()
        for _ in range(10):
            await scope.out.write(b"x")
        await scope.out.write(b"", last=True)

    scope = make_scope(exchange, stall_s=30.0)
    await scope.run(work)
    assert scope.error is None or exchange.answer.complete
    assert exchange.answer.body == b"x" * 10


@pytest.mark.parametrize("whole", [False, True])
async def test_a_large_part_that_moves_is_no_stall(make_exchange, whole):
    """At 4 KiB/s a megabyte takes 256 s, but there is progress all the time."""

    async def slow(exchange, message):
        await anyio.sleep(len(message.get("body", b"")) / 4096)

    exchange, content = make_exchange(on_send=slow), bytes(range(256)) * 4096

    async def work(scope):
        if whole:
            await scope.out.reply(Reply(200, content))
            return
        await scope.start_stream()
        await scope.out.write(content)
        await scope.out.write(content[:-1], last=True)

    scope = make_scope(exchange, stall_s=30.0)
    await scope.run(work)
    assert exchange.answer.complete
    assert exchange.answer.body == content + (b"" if whole else content[:-1])


async def test_a_stuck_send_cannot_hold_a_request_whose_client_left(make_exchange):
    async def stick(exchange, message):
        if message.get("body"):
            await anyio.sleep_forever()

    exchange = make_exchange(on_send=stick)

    async def work(scope):
        await scope.start_stream()
        await scope.out.write(b"x")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(make_scope(exchange).run, work)
        await anyio.sleep(5)
        exchange.disconnect()
    assert anyio.current_time() == pytest.approx(6.0)


async def test_cancellation_from_outside_closes_and_never_reaches_send(make_exchange):
    cancelled_in_send = False

    async def slow(exchange, message):
        nonlocal cancelled_in_send
        try:
            await anyio.sleep(0.5)
        except BaseException:
            cancelled_in_send = True
            raise

    exchange, work = make_exchange(on_send=slow), Work()
    with anyio.move_on_after(0.7):
        await make_scope(exchange).run(work)
    assert isinstance(work.error, GenerationClosedError)
    assert not cancelled_in_send
    assert anyio.current_time() < 2.0


async def test_cancellation_from_outside_does_not_cut_a_comment(make_exchange):
    cut = []

    async def slow(exchange, message):
        if not message.get("body"):
            return
        outside.cancel()
        try:
            await anyio.sleep(0.5)
        except BaseException as error:
            cut.append(error)
            raise

    exchange = make_exchange(on_send=slow)
    with anyio.CancelScope() as outside:
        await make_scope(exchange, keepalive_s=10.0).run(Work())
    assert exchange.answer.body == b": keep-alive\n\n"
    assert not cut


async def test_closing_interrupts_the_preparation_only(make_exchange):
    exchange = make_exchange()
    seen = []

    async def work(scope):
        try:
            with scope.interruptible():
                await anyio.sleep(1000)
        except DeadlineExceededError as error:
            seen.append(error)
        await scope.start_stream()
        await scope.out.write(b"", last=True)

    await make_scope(exchange, total_s=10.0).run(work)
    assert len(seen) == 1
    assert exchange.bookkeeping_done


async def test_the_first_reason_counts(make_exchange):
    exchange, work = make_exchange(), Work()
    scope = make_scope(exchange)

    async def close_twice(_):
        scope.attach(work)
        scope.close(DeadlineExceededError("first"))
        scope.close(GenerationClosedError("second"), gone=True)
        with pytest.raises(DeadlineExceededError):
            scope.attach(work)

    await scope.run(close_twice)
    assert str(work.error) == "first"


async def test_a_comment_that_finds_the_connection_lost_ends_the_request(make_exchange):
    async def lost(exchange, message):
        if message.get("body") == b": keep-alive\n\n":
            raise ConnectionResetError

    exchange, work = make_exchange(on_send=lost), Work()
    scope = make_scope(exchange, keepalive_s=15.0)
    await scope.run(work)
    assert isinstance(work.error, GenerationClosedError)
    assert scope.gone
    assert work.left_s < 25


async def test_a_server_that_raises_at_a_lost_connection(make_exchange):
    async def lost(exchange, message):
        raise ConnectionResetError

    exchange = make_exchange(on_send=lost)
    seen = []

    async def work(scope):
        with pytest.raises(GenerationClosedError):
            await scope.start_stream()
        seen.append(True)

    await make_scope(exchange).run(work)
    assert seen
