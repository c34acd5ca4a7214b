"""The model families, loaded on first use.

A new family is one module with a class that satisfies ``Model``, one row here, and one in ``core.model_spec`` for what
its ``config.json`` means.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import ClassVar, Protocol

from aserve.core.model_spec import ModelSpec
from aserve.layers.context import LayerContext
from aserve.models.model import Model

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "aserve.models.llama:Llama",
    "MistralForCausalLM": "aserve.models.llama:Llama",
    "Qwen2ForCausalLM": "aserve.models.llama:Llama",
    "Qwen3ForCausalLM": "aserve.models.qwen3:Qwen3",
    "Gemma2ForCausalLM": "aserve.models.gemma2:Gemma2",
    "Gemma3ForCausalLM": "aserve.models.gemma3:Gemma3",
    "Gemma3ForConditionalGeneration": "aserve.models.gemma3:Gemma3WithImages",
    "Phi3ForCausalLM": "aserve.models.phi3:Phi3",
    "Olmo2ForCausalLM": "aserve.models.olmo2:Olmo2",
    "GraniteForCausalLM": "aserve.models.llama:Llama",
    "GlmForCausalLM": "aserve.models.glm:Glm",
    "Glm4ForCausalLM": "aserve.models.glm:Glm4",
    "CohereForCausalLM": "aserve.models.cohere:Cohere",
    "Cohere2ForCausalLM": "aserve.models.cohere:Cohere",
    "Starcoder2ForCausalLM": "aserve.models.starcoder2:Starcoder2",
    "InternLM2ForCausalLM": "aserve.models.internlm2:InternLM2",
    "InternLM3ForCausalLM": "aserve.models.llama:Llama",
    "MixtralForCausalLM": "aserve.models.mixtures:Mixtral",
    "Qwen2MoeForCausalLM": "aserve.models.mixtures:Qwen2Moe",
    "Qwen3MoeForCausalLM": "aserve.models.mixtures:Qwen3Moe",
}
"""Architecture, as ``config.json`` names it, to "module:class"."""


class ModelFactory(Protocol):
    """A model class."""

    PREFIXES: ClassVar[Mapping[str, str]]
    """Beginnings of checkpoint names, and what stands for them in the model's table of weights."""

    def __call__(self, spec: ModelSpec, ctx: LayerContext, num_positions: int) -> Model: ...


def model_class(architecture: str) -> ModelFactory:
    """Return the class of an architecture that ``ModelSpec`` accepted: unknown ones are refused there."""
    module, _, name = ARCHITECTURES[architecture].partition(":")
    factory: ModelFactory = getattr(import_module(module), name)
    return factory
