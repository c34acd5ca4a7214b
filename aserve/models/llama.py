"""Llama (Touvron et al. 2023) and what shares its weights' names: Mistral, Qwen2, SmolLM2, TinyLlama and others.

Mistral differs by its sliding window, Qwen2 and Qwen2.5 by biases on queries, keys and values and the windows of single
layers, Granite by its multipliers, InternLM3 by biases, all of which the spec carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from aserve.core.model_spec import ModelSpec
from aserve.layers.batch import ForwardBatch
from aserve.layers.context import LayerContext
from aserve.layers.decoder import Decoder
from aserve.layers.weights import WeightRow, WeightTarget, expand_weights

ATTENTION_WEIGHTS = (
    WeightRow("model.layers.*.self_attn.q_proj", "layers.*.attention.qkv_proj.weights", "q"),
    WeightRow("model.layers.*.self_attn.k_proj", "layers.*.attention.qkv_proj.weights", "k"),
    WeightRow("model.layers.*.self_attn.v_proj", "layers.*.attention.qkv_proj.weights", "v"),
    WeightRow("model.layers.*.self_attn.o_proj", "layers.*.attention.o_proj.weights"),
)
HEAD_NORM_WEIGHTS = (
    WeightRow("model.layers.*.self_attn.q_norm", "layers.*.attention.q_norm"),
    WeightRow("model.layers.*.self_attn.k_norm", "layers.*.attention.k_norm"),
)
MLP_WEIGHTS = (
    WeightRow("model.layers.*.mlp.gate_proj", "layers.*.mlp.gate_up_proj.weights", "gate"),
    WeightRow("model.layers.*.mlp.up_proj", "layers.*.mlp.gate_up_proj.weights", "up"),
    WeightRow("model.layers.*.mlp.down_proj", "layers.*.mlp.down_proj.weights"),
)
FUSED_MLP_WEIGHTS = (
    WeightRow("model.layers.*.mlp.gate_up_proj", "layers.*.mlp.gate_up_proj.weights", "gate+up"),
    WeightRow("model.layers.*.mlp.down_proj", "layers.*.mlp.down_proj.weights"),
)
NORM_WEIGHTS = (
    WeightRow("model.layers.*.input_layernorm", "layers.*.input_norm"),
    WeightRow("model.layers.*.post_attention_layernorm", "layers.*.post_attention_norm"),
    WeightRow("model.norm", "norm"),
)
LAYER_WEIGHTS = (*ATTENTION_WEIGHTS, *MLP_WEIGHTS, *NORM_WEIGHTS)
UNTIED_ENDS = (WeightRow("model.embed_tokens", "embedding"), WeightRow("lm_head", "lm_head.weights"))
TIED_ENDS = (WeightRow("model.embed_tokens", "lm_head"),)


class Llama:
    """Satisfies ``Model``."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = LAYER_WEIGHTS
    # Angles that old checkpoints store; they are computed from the config.
    IGNORED: ClassVar[tuple[str, ...]] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
    PREFIXES: ClassVar[Mapping[str, str]] = {}

    def __init__(self, spec: ModelSpec, ctx: LayerContext, num_positions: int) -> None:
        self.spec = spec
        self.ctx = ctx
        self._decoder = Decoder(spec, ctx, num_positions)

    def weight_targets(self) -> dict[str, WeightTarget]:
        ends = TIED_ENDS if self.spec.tie_word_embeddings else UNTIED_ENDS
        return expand_weights(self._decoder, self.WEIGHTS + ends, range(self.spec.num_layers))

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._decoder.forward(batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.compute_logits(hidden)
