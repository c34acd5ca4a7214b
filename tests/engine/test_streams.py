"""The convenience interface: chat, complete, and leaving their streams in every way."""

from __future__ import annotations

import gc
import threading

import anyio
import numpy as np
import pytest

from aserve.core.errors import ContextLengthError, InvalidRequestError, QueueFullError
from aserve.core.request import FinishReason
from aserve.engine.options import GenerationOptions, check_options, make_request

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hello"}]


async def test_a_plain_loop(running, within):
    with within():
        async with running() as engine:
            text = "".join([delta.text async for delta in engine.chat(MESSAGES, max_tokens=12)])
            assert len(text) == 12
            [whole] = await engine.complete("hello", max_tokens=12).collect()
            assert (whole.text, whole.finish_reason, len(whole.token_ids)) == (text, FinishReason.LENGTH, 12)
            [same] = await engine.complete([256, *b"hello"], max_tokens=12).collect()
            assert same == whole


async def test_as_a_scope(running, within):
    with within():
        async with running(step_s=0.002, max_model_len=2000, num_blocks=600) as engine:
            async with engine.chat(MESSAGES, max_tokens=1500) as stream:
                delta = await stream.__anext__()
                assert stream.generation.num_prompt_tokens == 6
                assert len(delta.token_ids) == stream.generation.num_completion_tokens
            await engine.wait_idle()
            assert engine.stats().num_requests["cancelled"] == 1


async def test_breaking_out_of_a_plain_loop_cancels_promptly(running, within):
    with within():
        async with running(step_s=0.002, max_model_len=2000, num_blocks=600) as engine:
            async for _ in engine.chat(MESSAGES, max_tokens=1500):
                break
            await engine.wait_idle()
            stats = engine.stats()
            assert stats.num_requests["cancelled"] == 1
            assert stats.num_generated_tokens < 1500


async def test_a_stream_dropped_on_another_thread_cancels_on_the_loop(running, within):
    with within():
        async with running(step_s=0.002, max_model_len=2000, num_blocks=600) as engine:
            streams = [engine.chat(MESSAGES, max_tokens=1500)]
            await streams[0].__anext__()
            thread = threading.Thread(target=streams.clear)
            thread.start()
            thread.join()
            await engine.wait_idle()
            assert engine.stats().num_requests["cancelled"] == 1


async def test_a_stream_dropped_after_the_engine_is_harmless(running, within):
    with within():
        async with running(step_s=0.002, max_model_len=2000, num_blocks=600) as engine:
            stream = engine.chat(MESSAGES, max_tokens=1500)
            await stream.__anext__()
        del stream
        gc.collect()
        await anyio.sleep(0.01)


async def test_an_exception_or_a_deadline_in_the_loop_cancels(running, within):
    with within():
        async with running(step_s=0.002, max_model_len=2000, num_blocks=600) as engine:

            async def stumble():
                async for _ in engine.chat(MESSAGES, max_tokens=1500):
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await stumble()
            with anyio.move_on_after(0.05):
                async for _ in engine.chat(MESSAGES, max_tokens=1500):
                    pass
            await engine.wait_idle()
            assert engine.stats().num_requests["cancelled"] == 2


async def test_in_a_scope_a_cancelled_read_can_be_repeated(running, within):
    with within():
        async with running(step_s=0.01) as engine:
            async with engine.chat(MESSAGES, max_tokens=5) as stream:
                texts = []
                while len("".join(texts)) < 5:
                    with anyio.move_on_after(0.004):
                        texts.append((await stream.__anext__()).text)
            assert engine.stats().num_requests["length"] == 1


async def test_several_choices_and_stop_strings(running, within):
    with within():
        async with running(next_token=lambda tokens, seed: 97 + len(tokens) % 26) as engine:
            completions = await engine.complete("abc", n=3, stop="lm", max_tokens=50, seed=1).collect()
            assert len(completions) == 3
            assert {c.finish_reason for c in completions} == {FinishReason.STOP}
            assert all(c.text.endswith("k") for c in completions)


async def test_the_end_of_text_ends_unless_it_is_ignored(running, make_script, within):
    with within():
        async with running(next_token=make_script(b"hi", prompt=4)) as engine:
            [answer] = await engine.complete("abc").collect()
            assert (answer.text, answer.finish_reason) == ("hi", FinishReason.STOP)
            [answer] = await engine.complete("abc", ignore_eos=True, max_tokens=9).collect()
            assert (answer.text, answer.finish_reason) == ("hi", FinishReason.LENGTH)


async def test_refusals_come_from_the_first_use(running, within):
    with within():
        async with running(max_queue=0, max_num_seqs=1, step_s=0.005, max_model_len=2000, num_blocks=600) as engine:
            with pytest.raises(ContextLengthError, match="2001"):
                await engine.complete("a" * 2000).collect()
            with pytest.raises(ContextLengthError, match="at least"):
                await engine.complete("a" * 10**6).collect()
            async with engine.complete("a", max_tokens=1900):
                with pytest.raises(QueueFullError):
                    await engine.complete("a").collect()
            await engine.wait_idle()  # until then the place in the batch is taken, and nothing may wait
            stream = engine.complete("a", max_tokens=1)
            with pytest.raises(RuntimeError, match="started"):
                _ = stream.generation
            await stream.collect()
            with pytest.raises(RuntimeError, match="once"):
                await stream.__aenter__()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("n", 0),
        ("n", True),
        ("max_tokens", 0),
        ("seed", -1),
        ("num_logprobs", 21),
        ("repetition_penalty", 0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", [(1, 1.0)]),
        ("stop", 5),
        ("stop", [b"a"]),
        ("stop_token_ids", 7),
        ("stop_token_ids", [7.0]),
        ("stop_token_ids", "7"),
        ("cache_salt", "tenant"),
        ("priority", "high"),
        ("min_tokens", 1.0),
        ("ignore_eos", "yes"),
        ("include_stop", 1),
        ("skip_special_tokens", 0),
    ],
)
async def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError) as info:
        check_options({name: value})
    assert info.value.param == name
    assert name.replace("stop", "stop" if value else "stop string") in info.value.message


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("x", {"cache_salt": "tenant"}),
        ("x", {"priority": "high"}),
        ([1.0, 2.0], {}),
        (["1"], {}),
        ([-1], {}),
        ([2**80], {}),
        (7, {}),
        ("x", {"logit_bias": {1.5: 1.0}}),
    ],
)
async def test_a_wrong_argument_harms_nobody_else(running, within, prompt, options):
    with within():
        async with running(step_s=0.001) as engine, engine.complete("other", max_tokens=60) as other:
            with pytest.raises(InvalidRequestError) as info:
                await engine.complete(prompt, **options).collect()
            assert info.value.param == next(iter(options), "prompt")
            assert len((await other.collect())[0].token_ids) == 60
            assert engine.status == "running"


async def test_none_means_absent(running, within):
    names = GenerationOptions.__annotations__
    with within():
        async with running() as engine:
            options = dict.fromkeys(names) | {"seed": 1, "max_tokens": 5}
            [nothing] = await engine.complete("x", **options).collect()
            assert (nothing,) == await engine.complete("x", seed=1, max_tokens=5).collect()


async def test_ids_of_numpy_are_ids(running, within):
    with within():
        async with running() as engine:
            [whole] = await engine.complete(np.array([256, *b"hello"]), seed=1, max_tokens=5).collect()
            assert (whole,) == await engine.complete("hello", seed=1, max_tokens=5).collect()


async def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="warmth"):
        check_options({"warmth": 1})


async def test_options_become_a_request():
    common = {
        "request_id": "r",
        "prompt_token_ids": [1],
        "max_tokens": 5,
        "end_token_ids": (7, 9),
        "defaults": {"temperature": 0.5, "top_p": 0.9},
    }
    request = make_request(
        {"temperature": 0.0, "stop_token_ids": [8], "logit_bias": {3: 1.0, 2: -1.0}, "stop": "x", "seed": 4}, **common
    )
    assert (request.sampling.temperature, request.sampling.top_p) == (0.0, 0.9)
    assert request.sampling.stop_token_ids == (7, 8, 9)
    assert request.sampling.logit_bias == ((2, -1.0), (3, 1.0))
    assert (request.stop, request.sampling.seed, request.n) == (("x",), 4, 1)
    assert make_request({"ignore_eos": True}, **common).sampling.stop_token_ids == ()
    assert make_request({"min_tokens": 50}, **common).sampling.min_tokens == 5
    seeds = {make_request({}, **common).sampling.seed for _ in range(5)}
    assert len(seeds) == 5


async def test_a_stream_is_collected_once(running, within):
    with within():
        async with running() as engine:
            stream = engine.complete([97, 98], max_tokens=3)
            assert len(await stream.collect()) == 1
            with pytest.raises(RuntimeError, match="read to its end"):
                await stream.collect()
