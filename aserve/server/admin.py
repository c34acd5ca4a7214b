"""The small routes' answers: models, health, readiness, metrics, version. Pure functions of the engine's state."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from aserve.core.config import ServerConfig
from aserve.core.errors import ModelNotFoundError
from aserve.server.engine_slot import RETRY_WHILE_LOADING_S, EngineSlot
from aserve.server.metrics import CONTENT_TYPE, render
from aserve.server.openapi import document
from aserve.server.reply import Reply, json_reply
from aserve.server.request_counts import RequestCounts

if TYPE_CHECKING:
    from aserve.engine.engine import Engine


class Admin:
    """Answers from whatever engine is in the slot. Methods raise AserveError for what they cannot answer."""

    def __init__(self, slot: EngineSlot, server: ServerConfig, counts: RequestCounts) -> None:
        self._slot = slot
        self._watchdog_s = server.watchdog_s
        self._counts = counts
        self._created = int(time.time())
        self._document: tuple[tuple[str, ...], bytes] | None = None

    def models(self) -> Reply:
        """The served names. Raises EngineLoadingError."""
        engine = self._slot.get()
        entries = [self._model(name, engine) for name in engine.model_names]
        return json_reply(200, {"object": "list", "data": entries})

    def model(self, model_id: str) -> Reply:
        """One served name. Raises EngineLoadingError, ModelNotFoundError."""
        engine = self._slot.get()
        if model_id not in engine.model_names:
            raise ModelNotFoundError(f"the model '{model_id[:100]}' is not served here", param="model")
        return json_reply(200, self._model(model_id, engine))

    def health(self) -> Reply:
        """Liveness: red while loading, when the step loop has failed or hangs, and when the engine was closed."""
        engine = self._slot.engine
        if engine is None:
            return _not_well("loading", "the model is still being loaded")
        if engine.status == "dead":
            return _not_well("dead", "the step loop has failed")
        if engine.status == "closed":
            return _not_well("closed", "the engine has been closed")
        if engine.stalled(self._watchdog_s):
            return _not_well("stalled", f"no step has completed for {self._watchdog_s:g} s although there is work")
        return json_reply(200, {"status": "ok"})

    def ready(self) -> Reply:
        """Whether new requests should be sent here: as health, and red while draining, too."""
        engine = self._slot.engine
        if engine is not None and engine.status == "draining":
            return _not_well("draining", "the server is shutting down")
        return self.health()

    def metrics(self) -> Reply:
        return Reply(200, render(self._slot, self._counts), [(b"content-type", CONTENT_TYPE.encode())])

    def version(self) -> Reply:
        return json_reply(200, {"version": _version()})

    def openapi(self) -> Reply:
        """The description of this interface, built when it is first asked for, and again when the names are known."""
        engine = self._slot.engine
        names = () if engine is None else tuple(engine.model_names)
        if self._document is None or self._document[0] != names:
            self._document = names, document(_version(), names)
        return Reply(200, self._document[1], [(b"content-type", b"application/json")])

    def _model(self, name: str, engine: Engine) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "aserve",
            "root": name,
            "parent": None,
            "max_model_len": engine.capacity.max_model_len,
            "tasks": engine.abilities.tasks,
        }


def _version() -> str:
    try:
        return version("aserve")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def _not_well(status: str, reason: str) -> Reply:
    retry = [(b"retry-after", str(int(RETRY_WHILE_LOADING_S)).encode())] if status == "loading" else []
    return json_reply(503, {"status": status, "reason": reason}, retry)
