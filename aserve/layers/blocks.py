"""The layers of a decoder: attention and MLP with their norms, in the four arrangements that models have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from aserve.core.families import Block
from aserve.core.model_spec import ModelSpec
from aserve.layers.attention import Attention
from aserve.layers.batch import ForwardBatch
from aserve.layers.context import LayerContext
from aserve.layers.mixture import Mixture
from aserve.layers.mlp import GatedMlp, PlainMlp
from aserve.layers.norm import hidden_norm


class Layer(Protocol):
    """One layer of a decoder. The sum of ``x`` and ``residual`` (if there is one) is what the layer before made."""

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return (x, residual), both [T, H], whose sum is this layer's output; may overwrite both arguments."""
        ...


class PreNormLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)), with each addition fused into the norm that follows it."""

    __slots__ = ("_scale", "attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(self, spec: ModelSpec, layer: int, ctx: LayerContext, *, cos_sin: Tensor) -> None:
        self.input_norm, self.post_attention_norm = (hidden_norm(spec, ctx) for _ in range(2))
        self.attention = Attention(f"model.layers.{layer}.self_attn", spec, layer, ctx, cos_sin=cos_sin)
        self.mlp = _mlp(spec, layer, ctx)
        self._scale = spec.residual_scale

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return (output of the MLP, residual)."""
        if residual is None:
            residual, x = x, self.input_norm(x)
        else:
            x, residual = self.input_norm.add_and_norm(x, residual)
        x = self.attention(x, batch)
        if self._scale != 1.0:
            x *= self._scale
        x, residual = self.post_attention_norm.add_and_norm(x, residual)
        x = self.mlp(x)
        if self._scale != 1.0:
            x *= self._scale
        return x, residual


class SandwichLayer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): the layer of Gemma 2 and 3, and of GLM-4."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm", "post_mlp_norm", "pre_mlp_norm")

    def __init__(self, spec: ModelSpec, layer: int, ctx: LayerContext, *, cos_sin: Tensor) -> None:
        self.input_norm, self.post_attention_norm = (hidden_norm(spec, ctx) for _ in range(2))
        self.pre_mlp_norm, self.post_mlp_norm = (hidden_norm(spec, ctx) for _ in range(2))
        self.attention = Attention(f"model.layers.{layer}.self_attn", spec, layer, ctx, cos_sin=cos_sin)
        self.mlp = _mlp(spec, layer, ctx)

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return (norm of the MLP's output, residual)."""
        if residual is None:
            residual, x = x, self.input_norm(x)
        else:
            x, residual = self.input_norm.add_and_norm(x, residual)
        x = self.attention(x, batch)
        self.post_attention_norm.in_place(x)
        x, residual = self.pre_mlp_norm.add_and_norm(x, residual)
        x = self.mlp(x)
        self.post_mlp_norm.in_place(x)
        return x, residual


class PostNormLayer:
    """x + norm(attention(x)), then x + norm(mlp(x)): the layer of OLMo 2."""

    __slots__ = ("attention", "mlp", "post_attention_norm", "post_mlp_norm")

    def __init__(self, spec: ModelSpec, layer: int, ctx: LayerContext, *, cos_sin: Tensor) -> None:
        self.post_attention_norm, self.post_mlp_norm = (hidden_norm(spec, ctx) for _ in range(2))
        self.attention = Attention(f"model.layers.{layer}.self_attn", spec, layer, ctx, cos_sin=cos_sin)
        self.mlp = _mlp(spec, layer, ctx)

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return (norm of the MLP's output, residual)."""
        if residual is not None:
            x += residual
        attended = self.attention(x, batch)
        self.post_attention_norm.in_place(attended)
        residual = attended.add_(x)
        x = self.mlp(residual)
        self.post_mlp_norm.in_place(x)
        return x, residual


class ParallelLayer:
    """x + attention(norm(x)) + mlp(norm(x)), with one norm: the layer of Cohere's models."""

    __slots__ = ("attention", "input_norm", "mlp")

    def __init__(self, spec: ModelSpec, layer: int, ctx: LayerContext, *, cos_sin: Tensor) -> None:
        self.input_norm = hidden_norm(spec, ctx)
        self.attention = Attention(f"model.layers.{layer}.self_attn", spec, layer, ctx, cos_sin=cos_sin)
        self.mlp = _mlp(spec, layer, ctx)

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return (output of the MLP, the sum of the rest)."""
        if residual is None:
            residual, x = x, self.input_norm(x)
        else:
            x, residual = self.input_norm.add_and_norm(x, residual)
        return self.mlp(x), self.attention(x, batch).add_(residual)


LAYERS: Mapping[Block, Callable[..., Layer]] = {
    "pre": PreNormLayer,
    "sandwich": SandwichLayer,
    "post": PostNormLayer,
    "parallel": ParallelLayer,
}


def _mlp(spec: ModelSpec, layer: int, ctx: LayerContext) -> GatedMlp | PlainMlp | Mixture:
    name = f"model.layers.{layer}.mlp"
    if spec.experts is not None and spec.experts.by_layer[layer]:
        return Mixture(name, spec, spec.experts, ctx)
    return GatedMlp(name, spec, ctx) if spec.gated_mlp else PlainMlp(name, spec, ctx)
