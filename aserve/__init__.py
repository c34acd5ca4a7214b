"""aserve: an LLM inference server in which every request is a scope.

The public names. Each is loaded when it is first used (PEP 562), so that importing ``aserve`` costs nothing and the
server's half needs no torch, nor a program without HTTP a web framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aserve.assembly import open_engine
    from aserve.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
    from aserve.core.errors import AserveError
    from aserve.core.request import FinishReason, GenerationRequest, SamplingParams, TextDelta
    from aserve.engine.engine import Engine
    from aserve.llm import LLM, answer_all
    from aserve.server.app import create_app

__all__ = [
    "LLM",
    "AserveError",
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "GenerationRequest",
    "ModelConfig",
    "SamplingParams",
    "SchedulerConfig",
    "ServerConfig",
    "TextDelta",
    "answer_all",
    "create_app",
    "open_engine",
]

_HOMES = {
    "aserve.assembly": ("open_engine",),
    "aserve.core.config": ("CacheConfig", "EngineConfig", "ModelConfig", "SchedulerConfig", "ServerConfig"),
    "aserve.core.errors": ("AserveError",),
    "aserve.core.request": ("FinishReason", "GenerationRequest", "SamplingParams", "TextDelta"),
    "aserve.engine.engine": ("Engine",),
    "aserve.llm": ("LLM", "answer_all"),
    "aserve.server.app": ("create_app",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'aserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
