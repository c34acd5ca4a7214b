"""The three time limits in virtual time: alone, and over an engine whose steps the test releases."""

from __future__ import annotations

import json

import anyio
import pytest
from trio.testing import MockClock

from aserve.core.config import ServerConfig
from aserve.core.errors import DeadlineExceededError, IdleTimeoutError, InvalidRequestError, QueueTimeoutError
from aserve.server.asgi import RequestHead
from aserve.server.deadlines import Deadlines, TimeLimits

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}


class Timed:
    """What a generation tells of itself; the test turns it."""

    def __init__(self, begun_s=None, last_token_s=None):
        self._begun_s, self.last_token_s, self.has_arrived = begun_s, last_token_s, False
        self._callback = None
        self.num_looks = 0

    @property
    def begun_s(self):
        self.num_looks += 1
        return self._begun_s

    @begun_s.setter
    def begun_s(self, value):
        self._begun_s = value
        self._callback()

    def when_begun(self, callback):
        self._callback = callback


async def ended_by(limits, *timed, then=()):
    """The error and its time; ``then`` are (seconds, change) pairs."""
    came = []
    deadlines = Deadlines(TimeLimits(**limits), 0.0, retry_after_s=lambda: 7.0)
    for each in timed:
        deadlines.watch(each)

    async with anyio.create_task_group() as tasks:

        async def run():
            await deadlines.run(lambda error: came.append((type(error), anyio.current_time(), error.retry_after_s)))
            tasks.cancel_scope.cancel()

        async def change():
            for second, action in then:
                await anyio.sleep(second - anyio.current_time())
                action()
            await anyio.sleep(1000)
            tasks.cancel_scope.cancel()

        tasks.start_soon(run)
        tasks.start_soon(change)
    return came


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": MockClock(autojump_threshold=0)}


def says(timed, **values):
    return lambda: [setattr(timed, name, value) for name, value in values.items()]


class TestAlone:
    async def test_no_limits(self):
        assert await ended_by({}, Timed()) == []

    async def test_all_in_all(self):
        assert await ended_by({"total_s": 30, "queue_s": 40, "idle_s": 50}) == [(DeadlineExceededError, 30, None)]

    async def test_the_queue(self):
        assert await ended_by({"queue_s": 5}, Timed()) == [(QueueTimeoutError, 5, 7.0)]

    async def test_encoding_the_prompt_counts_as_queue(self):
        assert await ended_by({"queue_s": 5}) == [(QueueTimeoutError, 5, 7.0)]

    async def test_one_of_several_prompts_still_waits(self):
        assert await ended_by({"queue_s": 5}, Timed(begun_s=1.0), Timed()) == [(QueueTimeoutError, 5, 7.0)]

    async def test_what_has_begun_has_left_the_queue(self):
        timed = Timed()
        assert await ended_by({"queue_s": 5}, timed, then=[(4, says(timed, begun_s=4.0))]) == []

    async def test_silence_before_the_first_token(self):
        timed = Timed()
        came = await ended_by({"idle_s": 10}, timed, then=[(100, says(timed, begun_s=100.0))])
        assert came == [(IdleTimeoutError, 110, None)]

    async def test_silence_between_tokens(self):
        timed = Timed(begun_s=0.0)
        tokens = [(second, says(timed, last_token_s=float(second))) for second in (3, 12, 20)]
        assert await ended_by({"idle_s": 10}, timed, then=tokens) == [(IdleTimeoutError, 30, None)]

    async def test_silence_of_one_prompt_among_several(self):
        busy, silent = Timed(begun_s=0.0), Timed(begun_s=0.0, last_token_s=5.0)
        tokens = [(second, says(busy, last_token_s=float(second))) for second in range(2, 40, 2)]
        assert await ended_by({"idle_s": 10}, busy, silent, then=tokens) == [(IdleTimeoutError, 15, None)]

    async def test_what_has_arrived_is_not_idle(self):
        timed = Timed(begun_s=0.0, last_token_s=1.0)
        assert await ended_by({"idle_s": 10}, timed, then=[(2, says(timed, has_arrived=True))]) == []

    async def test_all_parts_must_have_begun(self):
        came, parts = [], [Timed(), Timed()]
        deadlines = Deadlines(TimeLimits(), 0.0)
        for part in parts:
            deadlines.watch(part)
        deadlines.when_begun(lambda: came.append(True))
        parts[1].begun_s = 1.0
        assert not came
        parts[0].begun_s = 2.0
        assert came == [True]
        deadlines.when_begun(lambda: came.append(False))
        assert came == [True, False], "at once"

    async def test_waiting_costs_nothing(self):
        """However short the limit on silence is, nothing looks again and again whether it has begun."""
        timed = Timed()
        came = await ended_by({"idle_s": 0.001}, timed, then=[(100, says(timed, begun_s=100.0))])
        assert came == [(IdleTimeoutError, pytest.approx(100.001), None)]
        assert timed.num_looks < 30

    async def test_the_wait_for_a_reader_costs_nothing(self):
        timed = Timed(begun_s=0.0, last_token_s=0.0)
        timed.has_arrived = True
        assert await ended_by({"idle_s": 0.001}, timed) == []
        assert timed.num_looks < 30


HEADERS = {"total_s": "x-request-timeout", "queue_s": "x-queue-timeout", "idle_s": "x-idle-timeout"}
SETTINGS = {"total_s": "request_timeout_s", "queue_s": "queue_timeout_s", "idle_s": "idle_timeout_s"}


def limits_of(settings, headers):
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    head = RequestHead(method="POST", path="/", headers=raw, http_version="1.1", request_id="r")
    return TimeLimits.of(ServerConfig(**settings), head)


@pytest.mark.parametrize("which", HEADERS)
async def test_the_shorter_of_server_and_client_counts(which):
    setting, header = SETTINGS[which], HEADERS[which]
    assert getattr(limits_of({setting: 5.0}, {}), which) == 5.0
    assert getattr(limits_of({setting: 5.0}, {header: "2.5"}), which) == 2.5
    assert getattr(limits_of({setting: 5.0}, {header: "60"}), which) == 5.0
    assert getattr(limits_of({}, {header: "60"}), which) == 60.0
    for wrong in ("0", "-1", "1e-9", "0.0009", "soon", "nan", "inf", ""):
        with pytest.raises(InvalidRequestError, match=f"(?i){header}"):
            limits_of({}, {header: wrong})


def body(**fields):
    return json.dumps({"model": "M", "prompt": "abc", "max_tokens": 50, "ignore_eos": True, **fields}).encode()


@pytest.fixture
def clock():
    return MockClock()


class TestOverAnEngine:
    """Time stands still but for what the test jumps over."""

    @pytest.fixture
    def anyio_backend(self, clock):
        return "trio", {"clock": clock}

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("who", ["server", "client"])
    async def test_queue_limit_is_a_status(self, serving, make_exchange, gate, clock, stream, who):
        server = {"queue_timeout_s": 5.0} if who == "server" else {}
        headers = JSON if who == "server" else {**JSON, "x-queue-timeout": "5"}
        async with serving(server=server, gate=gate, max_num_seqs=1) as client, anyio.create_task_group() as tasks:
            first, second = make_exchange(body()), make_exchange(body(stream=stream))
            stats = client.app.slot.engine.stats
            tasks.start_soon(client.run, first, "POST", COMPLETIONS, JSON)
            await client.until(lambda: stats().num_running == 1)
            tasks.start_soon(client.run, second, "POST", COMPLETIONS, headers)
            await client.submitted(2)
            gate.release(1)
            await client.until(lambda: stats().num_waiting == 1)
            clock.jump(4.9)
            await anyio.lowlevel.checkpoint()
            assert not second.answer.status
            clock.jump(0.2)
            await client.until(lambda: second.answer.complete)
            assert second.answer.status == 503
            assert second.answer.error["code"] == "queue_timeout"
            assert int(second.answer.header("retry-after")) >= 1
            gate.release(1)
            await client.until(lambda: stats().num_waiting == 0)
            first.disconnect()
            gate.open()
            await client.until(lambda: stats().num_used_blocks == 0)

    async def test_the_upload_is_no_part_of_the_queue(self, serving, make_exchange, clock):
        async with serving(server={"queue_timeout_s": 5.0}) as client, anyio.create_task_group() as tasks:
            client.limit_s = 1000
            start, end = body(max_tokens=3)[:20], body(max_tokens=3)[20:]
            exchange = make_exchange(chunks=[start, b""])
            exchange._incoming.pop()
            tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, JSON)
            await client.until(lambda: not exchange._incoming)
            clock.jump(20)
            exchange.push({"type": "http.request", "body": end, "more_body": False})
            await client.until(lambda: exchange.answer.complete)
            assert exchange.answer.status == 200

    async def test_the_whole_time_counts_the_upload(self, serving, make_exchange, clock):
        async with serving() as client, anyio.create_task_group() as tasks:
            client.limit_s = 1000
            exchange = make_exchange(chunks=[body()[:20], b""])
            exchange._incoming.pop()
            tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, {**JSON, "x-request-timeout": "5"})
            await client.until(lambda: not exchange._incoming)
            clock.jump(4.9)
            await anyio.lowlevel.checkpoint()
            assert not exchange.answer.status
            clock.jump(0.2)
            await client.until(lambda: exchange.answer.complete)
            assert exchange.answer.status == 504
            assert exchange.answer.error["code"] == "deadline_exceeded"
            assert exchange.answer.header("connection") == "close"

    async def test_a_long_queue_is_visible_before_its_limit(self, serving, make_exchange, gate, clock):
        """Headers wait for the first token only as long as a proxy would; then the limit is an event."""
        server = {"queue_timeout_s": 40.0, "sse_keepalive_s": 15.0}
        async with serving(server=server, gate=gate, max_num_seqs=1) as client, anyio.create_task_group() as tasks:
            stats = client.app.slot.engine.stats
            client.limit_s = 1000  # in virtual seconds
            first, second = make_exchange(body()), make_exchange(body(stream=True))
            tasks.start_soon(client.run, first, "POST", COMPLETIONS, JSON)
            await client.until(lambda: stats().num_running == 1)
            tasks.start_soon(client.run, second, "POST", COMPLETIONS, JSON)
            await client.submitted(2)
            gate.release(1)
            await client.until(lambda: stats().num_waiting == 1)
            clock.jump(14)
            await anyio.lowlevel.checkpoint()
            assert not second.answer.status
            clock.jump(2)
            await client.until(lambda: second.answer.status == 200)
            clock.jump(25)
            await client.until(lambda: second.answer.complete)
            assert json.loads(second.answer.data[-1])["error"]["code"] == "queue_timeout"
            assert "[DONE]" not in second.answer.body.decode()
            first.disconnect()
            gate.open()

    async def test_headers_wait_for_the_queue_and_not_for_tokens(self, serving, make_exchange, gate):
        server = {"queue_timeout_s": 40.0, "sse_keepalive_s": 0.0}
        async with serving(server=server, gate=gate) as client, anyio.create_task_group() as tasks:
            exchange = make_exchange(body(stream=True, max_tokens=3))
            tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, JSON)
            try:
                await client.until(lambda: exchange.answer.status == 200)
                assert client.app.slot.engine.stats().num_generated_tokens == 0
            finally:
                gate.open()
            await client.until(lambda: exchange.answer.complete)
            assert exchange.answer.data[-1] == "[DONE]"

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("header", "code"), [("idle", "idle_timeout"), ("request", "deadline_exceeded")])
    async def test_limits_of_what_runs(self, serving, make_exchange, gate, clock, stream, header, code):
        async with serving(gate=gate) as client, anyio.create_task_group() as tasks:
            stats = client.app.slot.engine.stats
            exchange = make_exchange(body(stream=stream))
            tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, {**JSON, f"x-{header}-timeout": "8"})
            await client.until(lambda: stats().num_running == 1)
            gate.release(1)
            await client.until(lambda: stats().num_generated_tokens == 1)
            clock.jump(8.1)
            await client.until(lambda: exchange.answer.complete)
            answer = exchange.answer
            assert answer.status == (200 if stream else 504)
            error = json.loads(answer.data[-1])["error"] if stream else answer.error
            assert error["code"] == code
            gate.release(1)  # one step: the KV cache is free after it
            await client.until(lambda: stats().num_used_blocks == 0)

    async def test_a_slow_reader_of_an_answer_that_is_there_is_not_idle(self, serving, make_exchange, gate, clock):
        taken = anyio.Event()

        async def slow(exchange, message):
            if message.get("body"):
                await taken.wait()

        async with serving(server={"stall_timeout_s": 500.0}, gate=gate) as client, anyio.create_task_group() as tasks:
            client.limit_s = 1000
            stats = client.app.slot.engine.stats
            exchange = make_exchange(body(stream=True, max_tokens=5), on_send=slow)
            tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, {**JSON, "x-idle-timeout": "8"})
            await client.until(lambda: stats().num_running == 1)
            gate.release(1)
            await client.until(lambda: exchange._sending)
            gate.open()
            await client.until(lambda: stats().num_generated_tokens == 5)
            clock.jump(100)
            await anyio.lowlevel.checkpoint()
            clock.jump(1)
            await anyio.lowlevel.checkpoint()
            taken.set()
            await client.until(lambda: exchange.answer.complete)
            assert exchange.answer.data[-1] == "[DONE]"
            assert exchange.answer.finish() == "length"

    @pytest.mark.parametrize("num_prompts", [1, 2])
    async def test_a_stuck_send_does_not_keep_the_cache(self, serving, make_exchange, gate, clock, num_prompts):
        taken = anyio.Event()

        async def stick(exchange, message):
            if message.get("body"):
                await taken.wait()

        async with serving(server={"stall_timeout_s": 500.0}, gate=gate) as client, anyio.create_task_group() as tasks:
            client.limit_s = 1000
            stats = client.app.slot.engine.stats
            raw = body(stream=True, max_tokens=400, prompt=["abc"] * num_prompts)
            exchange = make_exchange(raw, on_send=stick)
            tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, {**JSON, "x-request-timeout": "8"})
            await client.until(lambda: stats().num_running == num_prompts)
            gate.release(1)
            await client.until(lambda: exchange._sending)
            clock.jump(8.1)
            try:
                await client.submitted(0)
                gate.release(2)
                await client.until(lambda: stats().num_used_blocks == 0)
                assert exchange._sending, "the send is stuck still"
                assert stats().num_requests["cancelled"] == num_prompts
            finally:
                taken.set()
            await client.until(lambda: exchange.answer.complete)
            assert json.loads(exchange.answer.data[-1])["error"]["code"] == "deadline_exceeded"

    async def test_tokens_keep_a_request_alive(self, serving, make_exchange, gate, clock):
        async with serving(gate=gate) as client, anyio.create_task_group() as tasks:
            stats = client.app.slot.engine.stats
            client.limit_s = 1000
            exchange = make_exchange(body(max_tokens=5))
            tasks.start_soon(client.run, exchange, "POST", COMPLETIONS, {**JSON, "x-idle-timeout": "8"})
            await client.until(lambda: stats().num_running == 1)
            for number in range(1, 6):
                clock.jump(6)
                gate.release(1)
                await client.until(lambda number=number: stats().num_generated_tokens == number)
            await client.until(lambda: exchange.answer.complete)
            assert exchange.answer.status == 200
