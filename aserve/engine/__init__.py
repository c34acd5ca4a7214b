"""The async half: the engine, its requests as scopes, and the bridge to the step thread. anyio; never torch."""

from aserve.engine.engine import Engine, run_engine
from aserve.engine.generation import Generation
from aserve.engine.options import GenerationOptions
from aserve.engine.stats import EngineStats, HistogramStats
from aserve.engine.streams import ChatStream, Completion

__all__ = [
    "ChatStream",
    "Completion",
    "Engine",
    "EngineStats",
    "Generation",
    "GenerationOptions",
    "HistogramStats",
    "run_engine",
]
