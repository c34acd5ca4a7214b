"""GLM-4 (GLM team 2024): half of each head is rotated, channels in pairs; since 0414 with norms on both sides."""

from __future__ import annotations

from typing import ClassVar

from aserve.layers.weights import WeightRow
from aserve.models.llama import ATTENTION_WEIGHTS, FUSED_MLP_WEIGHTS, NORM_WEIGHTS, Llama


class Glm(Llama):
    """Satisfies ``Model``; the first models in transformers' form."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (*ATTENTION_WEIGHTS, *FUSED_MLP_WEIGHTS, *NORM_WEIGHTS)


class Glm4(Llama):
    """Satisfies ``Model``; GLM-4-0414."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (
        *ATTENTION_WEIGHTS,
        *FUSED_MLP_WEIGHTS,
        WeightRow("model.layers.*.input_layernorm", "layers.*.input_norm"),
        WeightRow("model.layers.*.post_self_attn_layernorm", "layers.*.post_attention_norm"),
        WeightRow("model.layers.*.post_attention_layernorm", "layers.*.pre_mlp_norm"),
        WeightRow("model.layers.*.post_mlp_layernorm", "layers.*.post_mlp_norm"),
        WeightRow("model.norm", "norm"),
    )
