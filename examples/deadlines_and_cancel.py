"""Requests are scopes: a deadline, a lost race or an exception ends them, and nothing of them stays behind.

python examples/deadlines_and_cancel.py smollm2-135m
"""

import sys
from functools import partial

import anyio

from aserve import Engine, EngineConfig, ModelConfig, open_engine


async def race(engine: Engine, questions: list[str]) -> str:
    """Ask all questions at once and return the answer that is complete first; the others are cancelled."""
    winner = ""

    async def ask(question: str, scope: anyio.CancelScope) -> None:
        nonlocal winner
        (completion,) = await engine.complete(question, max_tokens=64, ignore_eos=True).collect()
        winner = winner or completion.text
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        for question in questions:
            tasks.start_soon(ask, question, tasks.cancel_scope)
    return winner


async def main(model: str) -> None:
    """Shows a deadline, a race, and that the engine is empty afterwards."""
    async with open_engine(EngineConfig(model=ModelConfig(model=model))) as engine:
        num_tokens = 0
        with anyio.move_on_after(0.5) as deadline:
            async with engine.complete("Once upon a time", ignore_eos=True) as story:
                async for delta in story:
                    num_tokens += len(delta.token_ids)
        print(f"{num_tokens} tokens; ended by the deadline: {deadline.cancelled_caught}")

        print(f"first of two: {await race(engine, ['One, two,', 'Red, green,'])!r}")

        with anyio.fail_after(5):
            await engine.wait_idle()
        stats = engine.stats()
        print(f"running {stats.num_running}, waiting {stats.num_waiting}")


if __name__ == "__main__":
    anyio.run(partial(main, sys.argv[1]), backend="trio")
