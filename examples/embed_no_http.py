"""An engine inside a program, without HTTP: the same code under trio and under asyncio.

python examples/embed_no_http.py smollm2-135m asyncio
"""

import sys

import anyio

from aserve import EngineConfig, ModelConfig, open_engine


async def main(model: str) -> str:
    """Returns the answer that was printed."""
    config = EngineConfig(model=ModelConfig(model=model))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = ""
    async with open_engine(config) as engine:
        async for delta in engine.chat(messages, max_tokens=32, temperature=0):
            print(delta.text, end="", flush=True)
            text += delta.text
    print()
    return text


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], backend=sys.argv[2] if len(sys.argv) > 2 else "trio")
