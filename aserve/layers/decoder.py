"""A decoder: embedding, layers, final norm, head.

The families in ``aserve.models`` are this decoder with different specs and checkpoint names. A family that differs in
structure composes the other layers by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.core.model_spec import ModelSpec
from aserve.layers.batch import ForwardBatch
from aserve.layers.blocks import LAYERS
from aserve.layers.context import LayerContext
from aserve.layers.embedding import LMHead, TiedLMHead, VocabParallelEmbedding
from aserve.layers.norm import hidden_norm
from aserve.layers.rotary import build_cos_sin


class Decoder:
    """The whole network of a decoder-only model."""

    __slots__ = ("_embedding_scale", "_logit_scale", "_logit_softcap", "embedding", "layers", "lm_head", "norm")

    def __init__(self, spec: ModelSpec, ctx: LayerContext, num_positions: int) -> None:
        """``num_positions``: longest sequence that will be computed."""
        tables = {rope: build_cos_sin(rope, num_positions, ctx.device) for rope in {spec.rope, spec.window_rope}}
        ropes = [spec.rope if window is None else spec.window_rope for window in spec.sliding_windows]
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=ctx.dtype, device="cpu"))
        self._logit_scale = spec.logit_scale
        self._logit_softcap = spec.logit_softcap
        self.embedding = VocabParallelEmbedding("model.embed_tokens", spec.vocab_size, spec.hidden_size, ctx)
        layer = LAYERS[spec.block]
        self.layers = [layer(spec, n, ctx, cos_sin=tables[rope]) for n, rope in enumerate(ropes)]
        self.norm = hidden_norm(spec, ctx)
        self.lm_head: LMHead | TiedLMHead
        if spec.tie_word_embeddings:
            self.lm_head = TiedLMHead("lm_head", self.embedding, ctx)
        else:
            self.lm_head = LMHead("lm_head", spec.hidden_size, spec.vocab_size, ctx)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, H] after the final norm."""
        x, residual = self._embed(batch.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        assert residual is not None, "a model has at least one layer"
        return self.norm.add_and_norm(x, residual)[0]

    def _embed(self, input_ids: Tensor) -> Tensor:
        vectors = self.embedding(input_ids)
        if self._embedding_scale != 1.0:
            vectors *= self._embedding_scale
        return vectors

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [S, V] float32, a new tensor, for ``hidden`` [S, H]."""
        logits = self.lm_head(hidden)
        if self._logit_scale != 1.0:
            logits *= self._logit_scale
        if self._logit_softcap is not None:
            logits.div_(self._logit_softcap).tanh_().mul_(self._logit_softcap)
        return logits
