"""OLMo 2 (OLMo team 2024): norms only behind attention and MLP, and norms over all queries and all keys."""

from __future__ import annotations

from typing import ClassVar

from aserve.layers.weights import WeightRow
from aserve.models.llama import ATTENTION_WEIGHTS, HEAD_NORM_WEIGHTS, MLP_WEIGHTS, Llama


class Olmo2(Llama):
    """Satisfies ``Model``."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (
        *ATTENTION_WEIGHTS,
        *HEAD_NORM_WEIGHTS,
        *MLP_WEIGHTS,
        WeightRow("model.layers.*.post_attention_layernorm", "layers.*.post_attention_norm"),
        WeightRow("model.layers.*.post_feedforward_layernorm", "layers.*.post_mlp_norm"),
        WeightRow("model.norm", "norm"),
    )
