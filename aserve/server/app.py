"""The ASGI application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aserve.core.config import EngineConfig, ServerConfig
from aserve.server.engine_slot import EngineSlot

if TYPE_CHECKING:
    from aserve.engine.engine import Engine


class App:
    """The server as an ASGI 3 callable."""

    def __init__(self, slot: EngineSlot, server: ServerConfig, config: EngineConfig | None = None) -> None:
        self._slot = slot
        self._server = server
        self._config = config


def build_app(slot: EngineSlot, server: ServerConfig) -> App:
    """Make the application that answers from whatever engine is in the slot."""
    return App(slot, server)


def create_app(config: EngineConfig | None = None, *, engine: Engine | None = None,
               server: ServerConfig | None = None) -> App:
    """Make an application for embedding; give it either a configuration or a running engine."""
    return App(EngineSlot(engine), server or ServerConfig(), config)
