"""A pre-norm decoder: embedding, layers of attention and gated MLP, final norm, head.

The families in ``aserve.models`` are this decoder with different specs and checkpoint names. A family that differs in
structure composes the other layers by itself.
"""

from __future__ import annotations

from torch import Tensor

from aserve.core.model_spec import ModelSpec
from aserve.layers.attention import Attention
from aserve.layers.batch import ForwardBatch
from aserve.layers.context import LayerContext
from aserve.layers.embedding import LMHead, TiedLMHead, VocabParallelEmbedding
from aserve.layers.mlp import GatedMlp
from aserve.layers.norm import RmsNorm
from aserve.layers.rotary import build_cos_sin


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)), with each addition fused into the norm that follows it."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(self, spec: ModelSpec, layer: int, ctx: LayerContext, *, cos_sin: Tensor) -> None:
        name = f"model.layers.{layer}"
        self.input_norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps, ctx)
        self.attention = Attention(f"{name}.self_attn", spec, layer, ctx, cos_sin=cos_sin)
        self.post_attention_norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps, ctx)
        self.mlp = GatedMlp(f"{name}.mlp", spec.hidden_size, spec.intermediate_size, ctx, bias=spec.mlp_bias)

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return (output of the MLP, residual), both [T, H]; their sum is the layer's output."""
        if residual is None:
            residual, x = x, self.input_norm(x)
        else:
            x, residual = self.input_norm.add_and_norm(x, residual)
        x = self.attention(x, batch)
        x, residual = self.post_attention_norm.add_and_norm(x, residual)
        return self.mlp(x), residual


class Decoder:
    """The whole network of a decoder-only model."""

    __slots__ = ("embedding", "layers", "lm_head", "norm")

    def __init__(self, spec: ModelSpec, ctx: LayerContext, num_positions: int) -> None:
        """``num_positions``: longest sequence that will be computed."""
        cos_sin = build_cos_sin(spec.rope, num_positions, ctx.device)
        self.embedding = VocabParallelEmbedding("model.embed_tokens", spec.vocab_size, spec.hidden_size, ctx)
        self.layers = [DecoderLayer(spec, n, ctx, cos_sin=cos_sin) for n in range(spec.num_layers)]
        self.norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps, ctx)
        self.lm_head: LMHead | TiedLMHead
        if spec.tie_word_embeddings:
            self.lm_head = TiedLMHead("lm_head", self.embedding, ctx)
        else:
            self.lm_head = LMHead("lm_head", spec.hidden_size, spec.vocab_size, ctx)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, H] after the final norm."""
        first, *others = self.layers
        x, residual = first(self.embedding(batch.input_ids), None, batch)
        for layer in others:
            x, residual = layer(x, residual, batch)
        return self.norm.add_and_norm(x, residual)[0]
