"""aserve inside an asyncio program: an ASGI application under uvicorn, beside the program's own routes.

The application's lifespan owns the engine; a host that forwards lifespan events needs nothing else.

    python examples/embed_in_asyncio.py smollm2-135m 8000
    curl http://127.0.0.1:8000/hello
    curl http://127.0.0.1:8000/v1/models
"""

import sys
from typing import Any

import uvicorn

from aserve import EngineConfig, ModelConfig, create_app


def make_program(model: str) -> Any:
    """The host program as a plain ASGI application."""
    aserve = create_app(EngineConfig(model=ModelConfig(model=model)))

    async def program(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"].startswith("/v1/"):
            await aserve(scope, receive, send)
            return
        body = b"hello from the host"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": body})

    return program


if __name__ == "__main__":
    uvicorn.run(make_program(sys.argv[1]), port=int(sys.argv[2]))
