"""Where the server finds its engine: empty while the model loads, then filled once.

The listener is bound and answers before the model is loaded, so every route asks the slot instead of holding an
engine. Filled by ``serve`` or by the application's lifespan; read by the routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aserve.core.errors import EngineLoadingError

if TYPE_CHECKING:
    from aserve.engine.engine import Engine

RETRY_WHILE_LOADING_S = 5.0


class EngineSlot:
    """Holds at most one engine."""

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine

    @property
    def engine(self) -> Engine | None:
        return self._engine

    def fill(self, engine: Engine) -> None:
        """Put the engine in, once it is loaded."""
        self._engine = engine

    def clear(self) -> None:
        """Take the engine out again, before it is closed."""
        self._engine = None

    def get(self) -> Engine:
        """Return the engine. Raises EngineLoadingError while there is none."""
        if self._engine is None:
            raise EngineLoadingError(
                "the model is still being loaded; try again shortly", retry_after_s=RETRY_WHILE_LOADING_S
            )
        return self._engine

    def get_serving(self) -> Engine:
        """Return the engine if it admits requests. Raises EngineLoadingError, EngineDrainingError, EngineDeadError."""
        engine = self.get()
        engine.refuse_unless_running()
        return engine
