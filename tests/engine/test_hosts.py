"""The engine inside programs that were not started by anyio, which then has to find out by itself where it runs."""

from __future__ import annotations

import asyncio

import pytest
import trio


@pytest.mark.parametrize("run", [lambda main: asyncio.run(main()), trio.run], ids=["asyncio", "trio"])
def test_a_plain_event_loop(run, running, request_to):
    texts = []

    async def main():
        async with running(step_s=0.002, max_model_len=2000, num_blocks=600) as engine:
            async with engine.generate(request_to(engine, max_tokens=20)) as generation:
                texts.append("".join([delta.text async for delta in generation]))
            async for _ in engine.complete("abc", max_tokens=1500):
                break
            await engine.wait_idle()
            assert not engine.stalled(10)
            assert engine.stats().num_requests["cancelled"] == 1

    run(main)
    assert len(texts[0]) == 20
