"""Qwen2 and Qwen2.5 (Qwen team 2024): Llama's weights plus biases on queries, keys and values.

The biases and the windows of single layers are in the spec; the checkpoint's names are Llama's.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from aserve.core.model_spec import ModelSpec
from aserve.layers.batch import ForwardBatch
from aserve.layers.context import LayerContext
from aserve.layers.decoder import Decoder
from aserve.layers.weights import WeightRow, WeightTarget, expand_weights
from aserve.models.llama import LAYER_WEIGHTS, TIED_ENDS, UNTIED_ENDS


class Qwen2:
    """Satisfies ``Model``."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = LAYER_WEIGHTS
    # Angles that old checkpoints store; they are computed from the config.
    IGNORED: ClassVar[tuple[str, ...]] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)

    def __init__(self, spec: ModelSpec, ctx: LayerContext, num_positions: int) -> None:
        self.spec = spec
        self.ctx = ctx
        self._decoder = Decoder(spec, ctx, num_positions)

    def weight_targets(self) -> dict[str, WeightTarget]:
        ends = TIED_ENDS if self.spec.tie_word_embeddings else UNTIED_ENDS
        return expand_weights(self._decoder, self.WEIGHTS + ends, self.spec.num_layers)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._decoder.forward(batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.lm_head(hidden)
