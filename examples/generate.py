"""Answer many prompts without a server: the engine batches whatever runs at the same time.

python examples/generate.py smollm2-135m
"""

import sys

import anyio

from aserve import EngineConfig, ModelConfig, open_engine

PROMPTS = ["The capital of France is", "Water boils at", "The opposite of cold is"]


async def main(model: str) -> dict[str, str]:
    """Returns the continuation of each prompt."""
    texts: dict[str, str] = {}

    async with open_engine(EngineConfig(model=ModelConfig(model=model))) as engine:

        async def answer(prompt: str) -> None:
            (completion,) = await engine.complete(prompt, max_tokens=16, temperature=0).collect()
            texts[prompt] = completion.text

        async with anyio.create_task_group() as tasks:
            for prompt in PROMPTS:
                tasks.start_soon(answer, prompt)

    for prompt in PROMPTS:
        print(f"{prompt}{texts[prompt]!r}")
    return texts


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], backend="trio")
