"""One request as a scope, against a step loop that the test turns by hand."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from aserve.core.errors import (
    ContextLengthError,
    DeadlineExceededError,
    DetokenizationError,
    EngineDeadError,
    EngineDrainingError,
    GenerationClosedError,
    GenerationError,
    InvalidRequestError,
)
from aserve.core.request import FinishReason, SamplingParams
from aserve.core.step import INVALID_TOKEN

pytestmark = pytest.mark.anyio
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def read_all(generation):
    """Texts and finish reasons by choice."""
    texts, reasons = {}, {}
    async for delta in generation:
        assert delta.choice not in reasons, "a delta after the end"
        texts[delta.choice] = texts.get(delta.choice, "") + delta.text
        if delta.finish_reason:
            reasons[delta.choice] = delta.finish_reason
    return texts, reasons


async def test_deltas_bring_all_that_is_ready(manual, make_script, deliver_all):
    engine = manual(next_token=make_script(b"hello world", prompt=3))
    async with engine.generate(max_tokens=8) as generation:
        await engine.step()
        [first] = await generation.next_deltas()
        assert (first.text, first.token_ids, first.finish_reason) == ("h", (104,), None)
        await engine.step(3)
        [second] = await generation.next_deltas()
        assert second.text == "ell"
        await engine.step(10)
        [third] = await generation.next_deltas()
        assert (third.text, third.finish_reason) == ("o wo", LENGTH)
        assert await generation.next_deltas() == []
        assert await generation.next_deltas() == []
        assert (generation.num_prompt_tokens, generation.num_completion_tokens) == (3, 8)
        assert generation.finish_reasons == (LENGTH,)
    await engine.assert_nothing_left()
    assert engine.recorder.num_requests["length"] == 1


async def test_the_end_token_counts_and_does_not_show(manual, make_script):
    engine = manual(next_token=make_script(b"ok", prompt=3))
    async with engine.generate(sampling={"num_logprobs": 2}) as generation:
        await engine.step(4)
        [delta] = await generation.next_deltas()
        assert (delta.text, delta.token_ids, delta.finish_reason) == ("ok", (111, 107), STOP)
        assert len(delta.logprobs) == 2
        assert len(delta.logprobs[0].top) == 2
        assert generation.num_completion_tokens == 3


async def test_an_empty_answer_is_one_delta(manual, make_script):
    engine = manual(next_token=make_script(b"", prompt=3))
    async with engine.generate() as generation:
        await engine.step(2)
        [delta] = await generation.next_deltas()
        assert delta == (0, "", (), (), STOP, 0)


async def test_special_tokens_show_on_request(manual, make_script):
    engine = manual(next_token=make_script([*b"a", 259, *b"b"], prompt=3))
    for skip, text in ((True, "ab"), (False, "a<special>b")):
        async with engine.generate(max_tokens=3, skip_special_tokens=skip) as generation:
            await engine.step(3)
            assert (await generation.next_deltas())[0].text == text


async def test_a_cut_character_at_the_limit_is_replaced(manual, make_script):
    engine = manual(next_token=make_script("aé".encode(), prompt=3))
    async with engine.generate(max_tokens=2) as generation:
        await engine.step(2)
        [delta] = await generation.next_deltas()
        assert (delta.text, delta.finish_reason) == ("a\ufffd", LENGTH)


async def test_a_stop_string_in_the_last_held_back_bytes(manual, make_script):
    engine = manual(next_token=make_script("aé".encode(), prompt=3))
    async with engine.generate(max_tokens=2, stop=("\ufffd",)) as generation:
        await engine.step(2)
        [delta] = await generation.next_deltas()
        assert (delta.text, delta.finish_reason) == ("a", STOP)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("stop", "include", "text", "num_tokens"),
    [
        (("world",), False, "hello ", 11),
        (("o w",), False, "hell", 7),
        (("o w",), True, "hello w", 7),
        (("x", "llo"), False, "he", 5),
        (("hello world!!",), False, "hello world!", 12),
    ],
)
async def test_stop_strings(manual, make_script, at_once, stop, include, text, num_tokens):
    """The same text and count whether tokens are read one by one or all at once."""
    engine = manual(next_token=make_script(b"hello world!", prompt=3))
    matches = len(stop[0]) < 9
    async with engine.generate(max_tokens=30 if matches else 12, stop=stop, include_stop=include) as generation:
        shown, reason = "", None
        if at_once:
            await engine.step(20)
        while reason is None:
            if not at_once:
                await engine.step()
            for delta in await generation.next_deltas():
                shown, reason = shown + delta.text, delta.finish_reason
        assert shown == text
        assert generation.num_completion_tokens == num_tokens
        assert reason == (STOP if matches else LENGTH)
    await engine.assert_nothing_left()


async def test_a_stop_string_ends_its_sequence_at_once_and_only_that(manual):
    letters = {0: b"abcdefgh", 1: b"aXcdefgh"}
    engine = manual(next_token=lambda tokens, seed: letters[0 if seed == 7 else 1][(len(tokens) - 3) % 8])
    async with engine.generate(max_tokens=20, n=2, stop=("X",), sampling={"seed": 7}) as generation:
        await engine.step(3)
        deltas = await generation.next_deltas()
        assert [(d.choice, d.text, d.finish_reason) for d in deltas] == [(0, "abc", None), (1, "a", STOP)]
        assert engine.router.num_unfinished == 1
        await engine.step()
        assert engine.scheduler.stats().num_running == 1
        await engine.step(20)
        _, reasons = await read_all(generation)
        assert reasons == {0: LENGTH}
    await engine.assert_nothing_left()


async def test_choices_have_seeds_of_their_own_and_one_delta_each(manual):
    seeds = set()

    def model(tokens, seed):
        seeds.add(seed)
        return 97 + seed % 26

    engine = manual(next_token=model)
    async with engine.generate(max_tokens=5, n=4, sampling={"seed": 3}) as generation:
        await engine.step(3)
        deltas = await generation.next_deltas()
        assert [d.choice for d in deltas] == [0, 1, 2, 3]
        assert all(len(d.token_ids) == 3 for d in deltas)
        await engine.step(3)
        _, reasons = await read_all(generation)
        assert reasons == dict.fromkeys(range(4), LENGTH)
        assert generation.num_completion_tokens == 20
    assert len(seeds) == 4
    assert 3 in seeds
    await engine.assert_nothing_left()


async def test_cached_tokens_are_those_of_the_first_choice(manual):
    engine = manual()
    prompt = bytes(range(97, 97 + 13))
    for expected in (0, 12):
        async with engine.generate(prompt, max_tokens=2, n=2) as generation:
            await engine.step(3)
            await read_all(generation)
            assert generation.num_cached_tokens == expected
    await engine.assert_nothing_left()


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_leaving_early_cancels(manual, turns):
    engine = manual()
    async with engine.generate(max_tokens=50, n=3) as generation:
        await engine.step(turns)
        if turns:
            await generation.next_deltas()
    assert engine.router.num_unfinished == 0
    await engine.assert_nothing_left()
    assert engine.recorder.num_requests["cancelled"] == 1
    assert engine.recorder.num_cancelled_tokens == 3 * turns


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_read", [0, 2])
async def test_cancelled_tokens_are_all_that_no_complete_answer_has(manual, max_in_flight, num_read):
    engine = manual(max_in_flight=max_in_flight)
    async with engine.generate(max_tokens=2) as complete:
        async with engine.generate(max_tokens=50), engine.generate(max_tokens=50, n=2) as generation:
            await engine.step(num_read)
            if num_read:
                await generation.next_deltas()
            await engine.step(3)  # unread
            engine.turn()  # late: on its way to the loop when the request leaves
        await read_all(complete)
    await engine.assert_nothing_left()
    recorder = engine.recorder
    assert recorder.num_late_events > 0
    assert recorder.num_generated_tokens >= 2 + 3 * (num_read + 4)
    assert recorder.num_cancelled_tokens == recorder.num_generated_tokens - 2


async def test_tokens_after_a_stop_string_are_cancelled_ones(manual, make_script):
    engine = manual(next_token=make_script(b"hello world!", prompt=3))
    async with engine.generate(max_tokens=12, stop=("o w",)) as generation:
        await engine.step(10)
        await read_all(generation)
        assert generation.num_completion_tokens == 7
    await engine.assert_nothing_left()
    assert engine.recorder.num_cancelled_tokens == engine.recorder.num_generated_tokens - 7 > 0


@pytest.mark.parametrize("text", [b"", b"ok"])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("stop", [(), ("zz",)])
async def test_the_end_token_is_a_completion_token_however_it_is_read(manual, make_script, text, at_once, stop):
    engine = manual(next_token=make_script(text, prompt=3))
    async with engine.generate(stop=stop) as generation:
        for _ in range(len(text) + 1):
            await engine.step()
            if not at_once:
                await generation.next_deltas()
        await read_all(generation)
        assert generation.num_completion_tokens == len(text) + 1 == engine.recorder.num_generated_tokens


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_stop_string_that_only_the_end_completes_leaves_the_end_token_counted(manual, make_script, at_once):
    """The cut character becomes a replacement when the end token comes, and that is the stop string."""
    engine = manual(next_token=make_script("aé".encode()[:2], prompt=3))
    async with engine.generate(stop=("\ufffd",)) as generation:
        for _ in range(3):
            await engine.step()
            if not at_once:
                await generation.next_deltas()
        _, reasons = await read_all(generation)
        assert generation.finish_reasons == (STOP,)
        assert reasons == ({0: STOP} if at_once else {})
        assert generation.num_completion_tokens == 3


async def test_a_tokenizer_that_fails_on_entering_leaves_nothing_behind(manual):
    engine = manual()
    generation = engine.generate(n=2)
    engine.tokenizer.detokenizer = None
    with pytest.raises(TypeError):
        await generation.__aenter__()
    await engine.assert_nothing_left()


async def test_leaving_twice_or_before_entering_does_nothing(manual):
    engine = manual()
    generation = engine.generate()
    generation.leave()
    async with generation:
        pass
    generation.leave()
    assert engine.commands.num_put == 2
    assert sum(engine.recorder.num_requests.values()) == 1
    with pytest.raises(GenerationClosedError):
        await generation.next_deltas()
    with pytest.raises(RuntimeError, match="once"):
        await generation.__aenter__()


async def test_reading_before_entering_is_a_mistake(manual):
    with pytest.raises(RuntimeError, match="enter"):
        await manual().generate().next_deltas()


async def test_nothing_is_cancelled_after_the_end(manual):
    engine = manual()
    async with engine.generate(max_tokens=2) as generation:
        await engine.step(2)  # finished, unread
        assert generation.finish_reasons == (None,)
    assert engine.commands.num_put == 1


async def test_closing_wakes_the_reader_with_the_reason(manual, within):
    engine = manual()

    async def close_soon():
        await anyio.wait_all_tasks_blocked()
        generation.close(DeadlineExceededError("too late"))
        generation.close(GenerationClosedError("second"))

    with within():
        async with anyio.create_task_group() as tg, engine.generate(max_tokens=50) as generation:
            tg.start_soon(close_soon)
            with pytest.raises(DeadlineExceededError, match="too late"):
                await generation.next_deltas()
            assert generation.error is not None
            assert engine.router.num_unfinished == 1, "closing by itself cancels nothing"
    await engine.assert_nothing_left()
    assert engine.recorder.num_requests["cancelled"] == 1


async def test_closing_after_the_last_delta_changes_nothing(manual):
    engine = manual()
    async with engine.generate(max_tokens=1) as generation:
        await engine.step()
        await generation.next_deltas()
        generation.close(DeadlineExceededError("too late"))
        assert await generation.next_deltas() == []
    assert engine.recorder.num_requests["length"] == 1


async def test_a_deadline_as_a_cancel_scope_leaves_everything_consistent(manual):
    engine = manual()
    async with engine.generate(max_tokens=4) as generation:
        for _ in range(3):
            with anyio.move_on_after(0.001) as scope:
                await generation.next_deltas()
            assert scope.cancelled_caught
        await engine.step(4)
        texts, reasons = await read_all(generation)
        assert reasons == {0: LENGTH}
        assert len(texts[0]) == 4
    with anyio.move_on_after(0.001) as scope:
        async with engine.generate(max_tokens=50) as generation:
            await engine.step()
            while True:
                await generation.next_deltas()
    assert scope.cancelled_caught
    await engine.assert_nothing_left()


async def test_a_cancelled_scope_submits_nothing(manual):
    engine = manual()
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with engine.generate():
            pass
    assert scope.cancelled_caught
    assert engine.commands.num_put == 0
    assert engine.router.num_unfinished == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_output_that_is_not_a_number_fails_the_request_and_no_other(manual, n):
    def model(tokens, seed):
        return INVALID_TOKEN if tokens[0] == 98 and len(tokens) == 5 and seed == 0 else 97

    engine = manual(next_token=model)
    async with engine.generate(b"abc", max_tokens=4) as good:
        async with engine.generate(b"bbc", max_tokens=4, n=n) as bad:
            await engine.step(4)
            deltas = await bad.next_deltas()
            assert (deltas[0].text, deltas[0].finish_reason) == ("aa", None)
            with pytest.raises(GenerationError):
                await bad.next_deltas()
        assert (await read_all(good))[1] == {0: LENGTH}
    await engine.assert_nothing_left()
    assert engine.recorder.num_requests == {"stop": 0, "length": 1, "error": 1, "cancelled": 0}


async def test_output_that_is_not_a_number_from_the_start(manual):
    engine = manual(next_token=lambda tokens, seed: INVALID_TOKEN)
    async with engine.generate() as generation:
        await engine.step()
        with pytest.raises(GenerationError):
            await generation.next_deltas()
    await engine.assert_nothing_left()


@pytest.mark.parametrize("at_once", [False, True])
async def test_an_error_behind_a_stop_string_is_void_however_it_is_read(manual, at_once):
    """The step after the match runs before the cancel comes; what it brings counts for nothing, an error neither."""
    engine = manual(next_token=lambda tokens, seed: 97 if len(tokens) == 3 else INVALID_TOKEN)
    async with engine.generate(b"xyz", stop=("a",), max_tokens=5) as generation:
        await engine.step(2 if at_once else 1)
        (delta,) = await generation.next_deltas()
        assert (delta.text, delta.finish_reason) == ("", STOP)
        await engine.step(2)
        assert await generation.next_deltas() == []
    await engine.assert_nothing_left()
    assert engine.recorder.num_requests == {"stop": 1, "length": 0, "error": 0, "cancelled": 0}


async def test_single_deltas_and_all_at_once_can_be_mixed(manual):
    engine = manual()
    async with engine.generate(max_tokens=2, n=3) as generation:
        await engine.step(2)
        first = await generation.__anext__()
        rest = await generation.next_deltas()
        assert [d.choice for d in (first, *rest)] == [0, 1, 2]
        assert await generation.next_deltas() == []


async def test_death_reaches_running_and_queued_requests_once(manual, within):
    engine = manual(max_num_seqs=2)
    generations = [engine.generate(max_tokens=50) for _ in range(6)]
    errors = []

    async def read(generation):
        async with generation:
            try:
                while True:
                    await generation.next_deltas()
            except EngineDeadError as error:
                errors.append(error)

    with within():
        async with anyio.create_task_group() as tg:
            for generation in generations:
                tg.start_soon(read, generation)
            await anyio.wait_all_tasks_blocked()
            await engine.step(2)
            engine.fail(RuntimeError("CUDA error at 0xdead"))
    assert len(errors) == 6
    assert len(set(map(id, errors))) == 6
    assert not any("CUDA" in e.message for e in errors)
    assert engine.recorder.num_requests["error"] == 6
    with pytest.raises(EngineDeadError):
        await engine.generate().__aenter__()


async def test_a_finished_answer_can_be_read_after_death(manual, deliver_all):
    engine = manual()
    async with engine.generate(max_tokens=2) as generation:
        await engine.step(2)
        engine.fail(RuntimeError())
        await deliver_all()
        assert (await read_all(generation))[1] == {0: LENGTH}


async def test_draining_admits_nothing_and_finishes_what_runs(manual):
    engine = manual()
    async with engine.generate(max_tokens=2) as generation:
        engine.lifecycle.start_draining(7.0)
        with pytest.raises(EngineDrainingError) as info:
            await engine.generate().__aenter__()
        assert info.value.retry_after_s == 7.0
        await engine.step(2)
        assert (await read_all(generation))[1] == {0: LENGTH}


@pytest.mark.parametrize(
    ("fields", "error", "what"),
    [
        ({"prompt": b""}, InvalidRequestError, "empty"),
        ({"max_tokens": 0}, InvalidRequestError, "max_tokens"),
        ({"n": 0}, InvalidRequestError, "n must"),
        ({"n": 105}, InvalidRequestError, "n must"),
        ({"n": 10**9}, InvalidRequestError, "n must"),
        ({"n": 1.0}, InvalidRequestError, "n must"),
        ({"n": True}, InvalidRequestError, "n must"),
        ({"prompt": [97.0]}, InvalidRequestError, "prompt must be token ids"),
        ({"prompt": [97, True]}, InvalidRequestError, "True"),
        ({"prompt": ["a"]}, InvalidRequestError, "'a'"),
        ({"priority": "high"}, InvalidRequestError, "priority"),
        ({"priority": 2**63}, InvalidRequestError, "priority"),
        ({"cache_salt": "tenant"}, InvalidRequestError, "cache_salt must be bytes"),
        ({"stop": "abc"}, InvalidRequestError, "stop"),
        ({"stop": ("a", "")}, InvalidRequestError, "empty"),
        ({"stop": (1,)}, InvalidRequestError, "stop"),
        ({"include_stop": None}, InvalidRequestError, "include_stop"),
        ({"skip_special_tokens": "no"}, InvalidRequestError, "skip_special_tokens"),
        ({"max_tokens": "8"}, InvalidRequestError, "max_tokens"),
        ({"sampling": {"min_tokens": -1}}, InvalidRequestError, "min_tokens"),
        ({"sampling": {"min_tokens": 2**64}}, InvalidRequestError, "min_tokens"),
        ({"sampling": {"temperature": None}}, InvalidRequestError, "temperature"),
        ({"sampling": {"temperature": float("nan")}}, InvalidRequestError, "temperature"),
        ({"sampling": {"temperature": float("inf")}}, InvalidRequestError, "temperature"),
        ({"sampling": {"temperature": 1e300}}, InvalidRequestError, "temperature"),
        ({"sampling": {"temperature": -0.1}}, InvalidRequestError, "temperature"),
        ({"sampling": {"top_p": 2}}, InvalidRequestError, "top_p"),
        ({"sampling": {"top_k": -1}}, InvalidRequestError, "top_k"),
        ({"sampling": {"top_k": 1.5}}, InvalidRequestError, "top_k"),
        ({"sampling": {"min_p": -1}}, InvalidRequestError, "min_p"),
        ({"sampling": {"seed": 2**64}}, InvalidRequestError, "seed"),
        ({"sampling": {"seed": -1}}, InvalidRequestError, "seed"),
        ({"sampling": {"seed": None}}, InvalidRequestError, "seed"),
        ({"sampling": {"presence_penalty": "1"}}, InvalidRequestError, "presence_penalty"),
        ({"sampling": {"frequency_penalty": 3}}, InvalidRequestError, "frequency_penalty"),
        ({"sampling": {"repetition_penalty": 0}}, InvalidRequestError, "repetition_penalty"),
        ({"sampling": {"num_logprobs": 21}}, InvalidRequestError, "num_logprobs"),
        ({"sampling": {"logit_bias": ((1, float("nan")),)}}, InvalidRequestError, "logit_bias"),
        ({"sampling": {"logit_bias": ((1.0, 1.0),)}}, InvalidRequestError, "logit_bias"),
        ({"sampling": {"logit_bias": (1, 2)}}, InvalidRequestError, "logit_bias"),
        ({"sampling": {"logit_bias": {1: 2.0}}}, InvalidRequestError, "logit_bias"),
        ({"prompt": b"a" * 128}, ContextLengthError, "128"),
        ({"prompt": b"a" * 120, "max_tokens": 9}, ContextLengthError, "128"),
        ({"sampling": {"logit_bias": ((260, 1.0),)}}, InvalidRequestError, "260"),
        ({"sampling": {"logit_bias": ((-1, 1.0),)}}, InvalidRequestError, "-1"),
    ],
)
async def test_what_the_step_loop_could_not_take_is_refused(manual, fields, error, what):
    engine = manual()
    generation = engine.generate(**fields)
    with pytest.raises(error, match=what):
        await generation.__aenter__()
    generation.leave()
    assert engine.commands.num_put == 0
    assert engine.router.num_unfinished == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": 7},
        {"sampling": None},
        {"prompt_token_ids": [1, 2]},
        {"sampling": SamplingParams(max_tokens=8, stop_token_ids=[1])},
        {"sampling": SamplingParams(max_tokens=8, stop_token_ids=(1.0,))},
    ],
)
async def test_fields_of_a_wrong_kind_are_refused(manual, changes):
    engine = manual()
    with pytest.raises(InvalidRequestError) as info:
        await engine.generate(replace(engine.request(), **changes)).__aenter__()
    assert info.value.param
    assert engine.commands.num_put == 0


async def test_unusual_values_that_are_right_are_let_in(manual):
    engine = manual()
    sampling = {"temperature": 0, "top_k": 10**12, "top_p": 0, "seed": 2**64 - 1, "repetition_penalty": 2, "min_p": 1}
    bias = {"logit_bias": ((3, -1e9), (4, 1)), "num_logprobs": 0, "min_tokens": 10**6}
    async with engine.generate(max_tokens=2, sampling=sampling | bias, priority=-(2**63)) as generation:
        await engine.step(2)
        assert (await read_all(generation))[1] == {0: LENGTH}


async def test_an_id_that_is_in_use_is_refused(manual):
    engine = manual()
    request = engine.request()
    async with engine.generate(request):
        with pytest.raises(InvalidRequestError, match="running already"):
            await engine.generate(request).__aenter__()
        assert engine.router.num_unfinished == 1


async def test_latencies_are_counted(manual):
    engine = manual()
    async with engine.generate(max_tokens=3, n=2) as generation:
        await engine.step()
        await generation.next_deltas()
        await engine.step(2)
        await read_all(generation)
    recorder = engine.recorder
    assert recorder.time_to_first_token.snapshot().num_values == 1
    assert recorder.queue.snapshot().num_values == 1
    assert recorder.inter_token.snapshot().num_values == 2
    assert recorder.end_to_end.snapshot().num_values == 1
    assert recorder.num_prompt_tokens == 3
    assert recorder.num_generated_tokens == 6


async def test_a_fault_in_making_text_ends_its_request_alone(manual, caplog):
    """Whatever it raises: a panic in Rust is no Exception."""

    class Panic(BaseException):
        pass

    class Broken:
        def push(self, token_ids):
            raise Panic("in the decoder")

    engine = manual(max_in_flight=1)
    broken, other = engine.generate(max_tokens=3), engine.generate(max_tokens=3)
    async with broken, other:
        broken._choices[next(iter(broken._choices))]._detokenizer = Broken()
        await engine.step()
        with pytest.raises(DetokenizationError) as info:
            await broken.next_deltas()
        assert (info.value.status, info.value.code) == (500, "detokenization_failed")
        assert "decoder" not in info.value.message
        broken.leave()
        await engine.step(3)
        assert sum(len(d.token_ids) for d in await other.next_deltas()) == 3
    assert engine.recorder.num_requests["error"] == 1
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    await engine.assert_nothing_left()
