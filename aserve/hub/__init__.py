"""Where models come from: names, folders, hub ids and GGUF files, all made into Hugging Face folders."""

from aserve.hub.builtin import BUILTIN_MODELS
from aserve.hub.resolve import pull, resolve

__all__ = ["BUILTIN_MODELS", "pull", "resolve"]
