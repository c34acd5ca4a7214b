"""The application under a server that is not ours, its lifespan opening an engine with a double for its executor.

Run as a program: HOST OPTIONS, the options as JSON. Prints its port; ends on SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import trio

import aserve.assembly
from aserve.core.config import EngineConfig, ModelConfig, ServerConfig
from aserve.engine.engine import Engine
from aserve.server.app import create_app

HOST, OPTIONS = sys.argv[1], sys.argv[2]
sys.argv[1:] = [OPTIONS]
import serve_process  # noqa: E402 it reads its options from the command line


@asynccontextmanager
async def open_engine(config: EngineConfig) -> AsyncIterator[Engine]:
    async with serve_process.open_engine(config) as engine:
        yield engine
    print("engine closed", flush=True)


Program = Callable[[Any, Callable[[], Awaitable[None]]], Awaitable[None]]


def hypercorn_config(sock: socket.socket, config: Any) -> Any:
    config.bind = [f"fd://{sock.fileno()}"]
    config.graceful_timeout = 5.0
    config.shutdown_timeout = 5.0
    return config


async def hypercorn(loop: str, app: Any, sock: socket.socket, stop: Callable[[], Awaitable[None]]) -> None:
    if loop == "trio":
        from hypercorn.trio import serve
    else:
        from hypercorn.asyncio import serve
    from hypercorn.config import Config

    await serve(app, hypercorn_config(sock, Config()), shutdown_trigger=stop)


async def anycorn(app: Any, sock: socket.socket, stop: Callable[[], Awaitable[None]]) -> None:
    from anycorn import Config, serve

    await serve(app, hypercorn_config(sock, Config()), shutdown_trigger=stop)


async def uvicorn(app: Any, sock: socket.socket) -> None:
    from uvicorn import Config, Server

    config = Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=5)
    await Server(config).serve(sockets=[sock])


async def until_sigterm(_: int = 0) -> None:
    """Works on both loops: uvicorn has its own handlers, hypercorn and anycorn are given this."""
    ended = anyio.Event()
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _number in signals:
            ended.set()
            return


def main() -> None:
    aserve.assembly.open_engine = open_engine  # type: ignore[assignment]
    app = create_app(EngineConfig(model=ModelConfig(model="M")), server=ServerConfig(max_body_bytes=100_000))
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(100)
    sock.setblocking(False)
    print("port", sock.getsockname()[1], flush=True)
    server, _, loop = HOST.partition("-")
    if server == "uvicorn":
        asyncio.run(uvicorn(app, sock))
    elif server == "anycorn":
        anyio.run(anycorn, app, sock, until_sigterm, backend=loop)
    elif loop == "trio":
        trio.run(partial(hypercorn, loop), app, sock, until_sigterm)
    else:
        asyncio.run(hypercorn(loop, app, sock, until_sigterm))
    pools = ("MainThread", "AnyIO", "Trio thread")  # what both loops keep for later
    left = [t.name for t in threading.enumerate() if not t.name.startswith(pools)]
    print("ended, threads left:", left, flush=True)


if __name__ == "__main__":
    main()
