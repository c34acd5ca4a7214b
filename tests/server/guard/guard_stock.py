"""Stock hypercorn with the same app; prints its port. Run as a program, with settings as JSON."""

from __future__ import annotations

import json
import signal
import socket
import sys

import trio
from guard_app import App
from hypercorn.config import Config
from hypercorn.trio import serve


class WithEngine(App):
    """An app whose lifespan runs a task that fails a little later, as an engine can."""

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "lifespan":
            await super().__call__(scope, receive, send)
            return
        await receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.engine)
            await send({"type": "lifespan.startup.complete"})
            await receive()

    async def engine(self) -> None:
        await trio.sleep(0.3)
        raise RuntimeError("the engine has failed")


async def until_sigterm() -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            return


async def main() -> None:
    settings = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    app = WithEngine() if settings.pop("engine", False) else App()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = Config()
    config.bind = [f"fd://{sock.fileno()}"]
    config.keep_alive_timeout = 0.4
    config.h2_max_concurrent_streams = 32
    config.graceful_timeout = 0.5
    for name, value in settings.items():
        setattr(config, name, value)
    async with trio.open_nursery() as nursery:
        start = lambda task_status: serve(app, config, shutdown_trigger=until_sigterm, task_status=task_status)  # noqa: E731
        await nursery.start(start)  # type: ignore[arg-type]
        print(sock.getsockname()[1], flush=True)


trio.run(main)
