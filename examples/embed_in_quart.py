"""An engine inside a Quart program on trio: the program's own routes use it, and /v1 speaks OpenAI's API.

python examples/embed_in_quart.py smollm2-135m 8000
curl 'http://127.0.0.1:8000/ask?q=What+is+the+capital+of+France'
"""

import signal
import sys
from typing import Any

import hypercorn
import hypercorn.trio
import trio
from quart import request
from quart_trio import QuartTrio

from aserve import Engine, EngineConfig, ModelConfig, create_app, open_engine


def make_program(engine: Engine) -> QuartTrio:
    """The host program. It uses the engine, and somebody else owns it."""
    program = QuartTrio(__name__)

    @program.get("/ask")
    async def ask() -> dict[str, str]:
        """If the client leaves, Quart cancels this handler, and that cancels the answer."""
        messages = [{"role": "user", "content": request.args["q"]}]
        (answer,) = await engine.chat(messages, max_tokens=64, temperature=0).collect()
        return {"answer": answer.text}

    openai_api, own_routes = create_app(engine=engine), program.asgi_app

    async def dispatch(scope: Any, receive: Any, send: Any) -> None:
        app = openai_api if scope.get("path", "").startswith("/v1/") else own_routes
        await app(scope, receive, send)

    program.asgi_app = dispatch
    return program


async def stop_signal() -> None:
    """Returns at SIGTERM or Ctrl-C."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            return


async def main(model: str, port: int) -> None:
    """The engine outlives the server: requests end first, then the engine."""
    config = hypercorn.Config.from_mapping(bind=f"127.0.0.1:{port}", graceful_timeout=5)
    async with open_engine(EngineConfig(model=ModelConfig(model=model))) as engine:
        await hypercorn.trio.serve(make_program(engine), config, shutdown_trigger=stop_signal)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
