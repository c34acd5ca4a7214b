"""Where models come from: names, folders, hub ids and GGUF files, all made into Hugging Face folders."""

from aserve.hub.builtin import BUILTIN_MODELS, builtin_architecture
from aserve.hub.find_config import find_config
from aserve.hub.resolve import resolve

__all__ = ["BUILTIN_MODELS", "builtin_architecture", "find_config", "resolve"]
