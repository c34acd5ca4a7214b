"""Stock hypercorn with the same app and settings; prints its port. Run as a program."""

from __future__ import annotations

import socket

import trio
from guard_app import App
from hypercorn.config import Config
from hypercorn.trio import serve


async def main() -> None:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = Config()
    config.bind = [f"fd://{sock.fileno()}"]
    config.keep_alive_timeout = 0.4
    config.h2_max_concurrent_streams = 32
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, App(), config)  # type: ignore[arg-type]
        print(sock.getsockname()[1], flush=True)


trio.run(main)
