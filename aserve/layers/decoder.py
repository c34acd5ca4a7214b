"""A pre-norm decoder: embedding, layers of attention and gated MLP, final norm, head.

The families in ``aserve.models`` are this decoder with different specs, layers and checkpoint names. A family that
differs in structure composes the other layers by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from aserve.core.model_spec import ModelSpec
from aserve.layers.attention import Attention
from aserve.layers.batch import ForwardBatch
from aserve.layers.context import LayerContext
from aserve.layers.embedding import LMHead, TiedLMHead, VocabParallelEmbedding
from aserve.layers.mlp import GatedMlp
from aserve.layers.norm import RmsNorm
from aserve.layers.rotary import build_cos_sin


class Layer(Protocol):
    """One layer of a decoder. The sum of ``x`` and ``residual`` (if there is one) is what the layer before made."""

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return (x, residual), both [T, H], whose sum is this layer's output; may overwrite both arguments."""
        ...


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)), with each addition fused into the norm that follows it."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(self, spec: ModelSpec, layer: int, ctx: LayerContext, *, cos_sin: Tensor) -> None:
        name = f"model.layers.{layer}"
        self.input_norm, self.post_attention_norm = (_norm(spec, ctx) for _ in range(2))
        self.attention = Attention(f"{name}.self_attn", spec, layer, ctx, cos_sin=cos_sin)
        self.mlp = GatedMlp(f"{name}.mlp", spec, ctx)

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return (output of the MLP, residual)."""
        if residual is None:
            residual, x = x, self.input_norm(x)
        else:
            x, residual = self.input_norm.add_and_norm(x, residual)
        x = self.attention(x, batch)
        x, residual = self.post_attention_norm.add_and_norm(x, residual)
        return self.mlp(x), residual


class SandwichLayer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): the layer of Gemma 2 and 3."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm", "post_mlp_norm", "pre_mlp_norm")

    def __init__(self, spec: ModelSpec, layer: int, ctx: LayerContext, *, cos_sin: Tensor) -> None:
        name = f"model.layers.{layer}"
        self.input_norm, self.post_attention_norm = (_norm(spec, ctx) for _ in range(2))
        self.pre_mlp_norm, self.post_mlp_norm = (_norm(spec, ctx) for _ in range(2))
        self.attention = Attention(f"{name}.self_attn", spec, layer, ctx, cos_sin=cos_sin)
        self.mlp = GatedMlp(f"{name}.mlp", spec, ctx)

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


class Decoder:
    """The whole network of a decoder-only model."""

    __slots__ = ("_embedding_scale", "_logit_softcap", "embedding", "layers", "lm_head", "norm")

    def __init__(
        self, spec: ModelSpec, ctx: LayerContext, num_positions: int, layer: Callable[..., Layer] = DecoderLayer
    ) -> None:
        """``num_positions``: longest sequence that will be computed; ``layer``: class of the layers."""
        tables = {rope: build_cos_sin(rope, num_positions, ctx.device) for rope in {spec.rope, spec.window_rope}}
        ropes = [spec.rope if window is None else spec.window_rope for window in spec.sliding_windows]
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=ctx.dtype, device="cpu"))
        self._logit_softcap = spec.logit_softcap
        self.embedding = VocabParallelEmbedding("model.embed_tokens", spec.vocab_size, spec.hidden_size, ctx)
        self.layers = [layer(spec, n, ctx, cos_sin=tables[rope]) for n, rope in enumerate(ropes)]
        self.norm = _norm(spec, ctx)
        self.lm_head: LMHead | TiedLMHead
        if spec.tie_word_embeddings:
            self.lm_head = TiedLMHead("lm_head", self.embedding, ctx)
        else:
            self.lm_head = LMHead("lm_head", spec.hidden_size, spec.vocab_size, ctx)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, H] after the final norm."""
        first, *others = self.layers
        embedded = self.embedding(batch.input_ids)
        if self._embedding_scale != 1.0:
            embedded *= self._embedding_scale
        x, residual = first(embedded, None, batch)
        for layer in others:
            x, residual = layer(x, residual, batch)
        return self.norm.add_and_norm(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [S, V] float32, a new tensor, for ``hidden`` [S, H]."""
        logits = self.lm_head(hidden)
        if self._logit_softcap is not None:
            logits.div_(self._logit_softcap).tanh_().mul_(self._logit_softcap)
        return logits


def _norm(spec: ModelSpec, ctx: LayerContext) -> RmsNorm:
    return RmsNorm(spec.hidden_size, spec.rms_norm_eps, ctx, unit_offset=spec.norm_unit_offset)
