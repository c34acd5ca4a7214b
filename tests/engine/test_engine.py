"""The whole engine with its thread: opening, closing, draining, death, stalls."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from aserve.core.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineDrainingError,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
)
from aserve.core.request import FinishReason
from aserve.testing import FakeExecutor

pytestmark = pytest.mark.anyio


def num_step_threads():
    return sum(thread.name == "aserve-steps" for thread in threading.enumerate())


async def text_of(generation):
    async with generation:
        return "".join([delta.text async for delta in generation])


async def test_requests_run_together(running, request_to, within):
    texts = {}

    async def ask(engine, n):
        texts[n] = await text_of(engine.generate(request_to(engine, b"prompt %d" % (n % 5), 20)))

    with within():
        async with running() as engine:
            assert engine.status == "running"
            assert engine.model_names == ("fake",)
            async with anyio.create_task_group() as tg:
                for n in range(20):
                    tg.start_soon(ask, engine, n)
            await engine.wait_idle()
            stats = engine.stats()
    assert all(len(text) == 20 for text in texts.values())
    assert len(set(texts.values())) == 5
    assert stats.num_requests["length"] == 20
    assert stats.num_generated_tokens == 400
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_late_events == 0
    assert stats.num_blocks == 64
    assert 0 < stats.wait_s < stats.busy_s
    assert stats.time_to_first_token_s.num_values == 20
    assert num_step_threads() == 0


async def test_opening_and_closing_again_and_again_and_two_at_once(running, request_to, within):
    with within():
        for _ in range(5):
            async with running() as one, running() as two:
                assert num_step_threads() == 2
                texts = [await text_of(e.generate(request_to(e))) for e in (one, two)]
                assert texts[0] == texts[1] != ""
            assert num_step_threads() == 0


async def test_a_failure_while_loading_comes_out_unchanged(running, within):
    error = ModelLoadError("weights are missing")

    def load():
        raise error

    with within(), pytest.raises(ModelLoadError) as info:
        async with running(factory=load):
            raise AssertionError("not reached")
    assert info.value is error
    assert num_step_threads() == 0


async def test_loading_can_be_cancelled_and_cleans_up_behind(running, capacity, within):
    release = threading.Event()
    executor = FakeExecutor(capacity)

    def load():
        release.wait(10)
        return executor

    with within():
        with anyio.move_on_after(0.05) as scope:
            async with running(factory=load):
                raise AssertionError("not reached")
        assert scope.cancelled_caught
        assert not release.is_set()
        release.set()
        while num_step_threads():
            await anyio.sleep(0.005)
    assert executor.closed


async def test_closing_ends_what_is_open(running, request_to, within):
    with within():
        async with anyio.create_task_group() as tg:
            async with running(step_s=0.002) as engine:
                generation = engine.generate(request_to(engine, max_tokens=100))
                done = anyio.Event()

                async def read():
                    with pytest.raises(EngineDrainingError):
                        await text_of(generation)
                    done.set()

                tg.start_soon(read)
                await anyio.sleep(0.02)
            await done.wait()
            await engine.wait_idle()
            assert engine.status == "closed"
            assert not engine.stalled(0)
            with pytest.raises(EngineDrainingError, match="closed") as info:
                await engine.generate(request_to(engine)).__aenter__()
            assert info.value.retry_after_s is None
    assert num_step_threads() == 0


async def test_a_cancelled_host_leaves_no_thread(running, request_to, within):
    with within():
        with anyio.move_on_after(0.05) as scope:
            async with running(step_s=0.001) as engine, engine.generate(request_to(engine, max_tokens=120)) as reader:
                while True:
                    await reader.next_deltas()
                    await anyio.sleep(0.2)
        assert scope.cancelled_caught
    assert num_step_threads() == 0


async def test_an_error_in_the_body_comes_out_bare(running, within):
    with within(), pytest.raises(ZeroDivisionError):
        async with running():
            raise ZeroDivisionError
    assert num_step_threads() == 0


async def test_death_reaches_16_running_and_16_queued_requests_once(running, request_to, within, caplog):
    outcomes = []

    async def ask(engine):
        try:
            await text_of(engine.generate(request_to(engine, max_tokens=60)))
        except EngineDeadError as error:
            outcomes.append(error)
        else:
            outcomes.append(None)

    with within():
        async with running(max_num_seqs=16, num_blocks=256, step_s=0.002, fail_at_step=20) as engine:
            async with anyio.create_task_group() as tg:
                for _ in range(32):
                    tg.start_soon(ask, engine)
                await engine.wait_dead()
            assert engine.status == "dead"
            assert "injected" in str(engine.failure)
            with pytest.raises(EngineDeadError):
                await engine.generate(request_to(engine)).__aenter__()
            await engine.wait_idle()
            assert engine.stats().num_requests["error"] == 32
    assert len(outcomes) == 32
    assert all(isinstance(e, EngineDeadError) and "injected" not in e.message for e in outcomes)
    errors = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(errors) == 1
    assert "injected" in errors[0].exc_text


async def test_draining(running, request_to, within):
    with within():
        async with running(step_s=0.001) as engine, engine.generate(request_to(engine, max_tokens=30)) as generation:
            engine.start_draining(3.0)
            assert engine.status == "draining"
            with pytest.raises(EngineDrainingError) as info:
                await engine.generate(request_to(engine)).__aenter__()
            assert info.value.retry_after_s == 3.0
            await engine.wait_idle()  # finished, though not read
            deltas = await generation.next_deltas()
            assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_several_tasks_can_wait_for_idleness(running, request_to, within):
    with within():
        async with running(step_s=0.002) as engine, anyio.create_task_group() as tg:
            generation = engine.generate(request_to(engine, max_tokens=5))
            await generation.__aenter__()
            tg.start_soon(engine.wait_idle)
            tg.start_soon(engine.wait_idle)
            await generation.next_deltas()
            generation.leave()


async def test_idle_after_a_cancel_means_that_the_blocks_are_back(running, request_to, within):
    with within():
        async with running(step_s=0.002) as engine:
            await engine.wait_idle()
            async with engine.generate(request_to(engine, max_tokens=100, n=3)) as generation:
                await generation.next_deltas()
                assert engine.stats().num_used_blocks > 0
            await engine.wait_idle()
            assert engine.stats().num_used_blocks == 0


async def test_a_full_queue(running, request_to, within):
    with within():
        async with running(max_queue=2, max_num_seqs=1, step_s=0.001) as engine:
            generations = [engine.generate(request_to(engine, max_tokens=100)) for _ in range(3)]
            for generation in generations:
                await generation.__aenter__()
            with pytest.raises(QueueFullError) as info:
                await engine.generate(request_to(engine)).__aenter__()
            assert info.value.retry_after_s >= 1
            assert engine.stats().num_rejected == 1
            generations[0].leave()
            await text_of(engine.generate(request_to(engine, max_tokens=1)))


async def test_a_stalled_step_is_noticed_and_idleness_is_not_a_stall(running, request_to, capacity, within):
    hang = threading.Event()

    class Hanging(FakeExecutor):
        def wait(self):
            hang.wait(10)
            return super().wait()

    with within():
        async with running(factory=partial(Hanging, capacity)) as engine:
            await anyio.sleep(0.03)
            assert not engine.stalled(0.02)
            async with engine.generate(request_to(engine, max_tokens=2)) as generation:
                assert not engine.stalled(10)
                await anyio.sleep(0.03)
                assert engine.stalled(0.02)
                assert engine.stats().last_step_age_s > 0.02
                hang.set()
                await generation.next_deltas()
                assert not engine.stalled(5)
            await engine.wait_idle()
            await anyio.sleep(0.03)
            assert not engine.stalled(0.02)


async def test_a_hung_step_is_noticed_though_its_clients_give_up_one_after_another(
    running, request_to, capacity, within
):
    hang = threading.Event()

    class Hanging(FakeExecutor):
        def wait(self):
            hang.wait(10)
            return super().wait()

    with within():
        async with running(factory=partial(Hanging, capacity)) as engine:
            for _ in range(6):
                async with engine.generate(request_to(engine)) as generation:
                    with anyio.move_on_after(0.01):
                        await generation.next_deltas()
            assert engine.stalled(0.05), "nobody waits at this moment, and the thread still hangs"
            hang.set()
            await engine.wait_idle()
            assert not engine.stalled(0)
            assert engine.stats().last_step_age_s < 5


async def test_closing_all_that_is_open_frees_everything_and_the_engine_goes_on(running, request_to, within):
    errors = []

    async def ask(engine):
        with pytest.raises(DeadlineExceededError) as info:
            await text_of(engine.generate(request_to(engine, max_tokens=100, n=2)))
        errors.append(info.value)

    with within():
        async with running(max_num_seqs=2, step_s=0.005) as engine:
            complete = engine.generate(request_to(engine, max_tokens=1))
            await complete.__aenter__()
            await engine.wait_idle()
            async with anyio.create_task_group() as tg:
                for _ in range(3):  # one runs, two wait
                    tg.start_soon(ask, engine)
                while not engine.stats().num_running or engine.stats().num_waiting < 4:
                    await anyio.sleep(0.005)
                engine.close_all(lambda: DeadlineExceededError("the drain is over"))
                engine.close_all(lambda: DeadlineExceededError("again"))
            await engine.wait_idle()
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
            assert stats.num_requests["cancelled"] == 3
            assert len((await complete.next_deltas())[0].token_ids) == 1, "all its tokens had come"
            complete.leave()
            assert len(await text_of(engine.generate(request_to(engine)))) == 8
    assert len(set(map(id, errors))) == 3
    assert {e.message for e in errors} == {"the drain is over"}


async def test_a_fault_in_the_delivery_stops_the_thread(running, request_to, capacity, within, monkeypatch, caplog):
    executors = []

    def load():
        executors.append(FakeExecutor(capacity, step_s=0.001))
        return executors[0]

    with within():
        async with running(factory=load) as engine, engine.generate(request_to(engine, max_tokens=100)) as generation:
            await generation.next_deltas()
            monkeypatch.setattr(engine._recorder, "note_events", None)
            with pytest.raises(EngineDeadError):
                _ = [delta async for delta in generation]
            assert engine.status == "dead"
            while num_step_threads():
                await anyio.sleep(0.005)
            assert executors[0].closed
            await engine.wait_idle()
    assert [r.levelname for r in caplog.records] == ["ERROR"], "nothing is left behind, so no warning either"


async def test_no_more_sequences_than_batch_and_queue_hold(running, request_to, within):
    with within():
        async with running(max_queue=2, max_num_seqs=3) as engine:
            assert engine.max_sequences == 5
            assert len(await text_of(engine.generate(request_to(engine, max_tokens=2, n=5)))) == 10
            with pytest.raises(InvalidRequestError, match="between 1 and 5"):
                await engine.generate(request_to(engine, n=6)).__aenter__()


async def test_a_thread_that_hangs_is_left_behind(running, request_to, capacity, within, caplog):
    hang, hangs = threading.Event(), threading.Event()

    class Hanging(FakeExecutor):
        def wait(self):
            hangs.set()
            hang.wait(10)
            return super().wait()

    with within():
        async with running(factory=partial(Hanging, capacity), join_timeout_s=0.05) as engine:
            generation = engine.generate(request_to(engine))
            await generation.__aenter__()
            while not hangs.is_set():
                await anyio.sleep(0.005)
        assert "did not end" in caplog.text
        assert num_step_threads() == 1
        hang.set()
        while num_step_threads():
            await anyio.sleep(0.005)


async def test_an_idle_engine_uses_no_time(running, within):
    with within():
        async with running() as engine:
            before = engine.stats()
            await anyio.sleep(0.05)
            after = engine.stats()
            assert after.busy_s == before.busy_s
            assert after.num_steps == 0


async def test_a_busy_host_gets_everything_at_once(running, request_to, within):
    """While the event loop is blocked the thread goes on, and never waits for it."""
    with within():
        async with running() as engine, engine.generate(request_to(engine, max_tokens=20)) as generation:
            time.sleep(0.3)
            deltas = await generation.next_deltas()
            while not deltas[-1].finish_reason:
                deltas = await generation.next_deltas()
            assert generation.num_completion_tokens == 20


async def test_ids_that_the_vocabulary_lacks_are_refused(running, request_to, within):
    with within():
        async with running() as engine:
            with pytest.raises(InvalidRequestError, match="999"):
                await text_of(engine.generate(request_to(engine, [1, 999])))


async def test_ids_that_the_model_does_not_know_are_refused(running, request_to):
    """A tokenizer may know more ids than the model has embeddings for; such a prompt must not reach the model."""
    async with running(vocab_size=258) as engine:
        assert engine.vocab_size == 258
        with pytest.raises(InvalidRequestError, match="257"):
            await text_of(engine.generate(replace(request_to(engine), prompt_token_ids=(258,))))
        assert len(await text_of(engine.generate(replace(request_to(engine), prompt_token_ids=(257,))))) == 8


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_program_that_ends_while_an_engine_still_loads(backend):
    """The loading thread is waited for: stopped inside native code at exit, it would abort the process."""
    script = Path(__file__).with_name("exit_while_loading.py")
    done = subprocess.run([sys.executable, script, backend], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["given up", "loaded"]), done.stderr
