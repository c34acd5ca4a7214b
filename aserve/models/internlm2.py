"""InternLM2 (Cai et al. 2024): Llama under other names, its projections stored by KV head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from aserve.layers.weights import WeightRow
from aserve.models.llama import Llama


class InternLM2(Llama):
    """Satisfies ``Model``."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (
        WeightRow("model.layers.*.attention_norm", "layers.*.input_norm"),
        WeightRow("model.layers.*.attention.wqkv", "layers.*.attention.qkv_proj.weights", "q+k+v"),
        WeightRow("model.layers.*.attention.wo", "layers.*.attention.o_proj.weights"),
        WeightRow("model.layers.*.ffn_norm", "layers.*.post_attention_norm"),
        WeightRow("model.layers.*.feed_forward.w1", "layers.*.mlp.gate_up_proj.weights", "gate"),
        WeightRow("model.layers.*.feed_forward.w3", "layers.*.mlp.gate_up_proj.weights", "up"),
        WeightRow("model.layers.*.feed_forward.w2", "layers.*.mlp.down_proj.weights"),
        WeightRow("model.norm", "norm"),
    )
    # Names that only the ends of InternLM2 have; they follow from Llama's.
    PREFIXES: ClassVar[Mapping[str, str]] = {"model.tok_embeddings.": "model.embed_tokens.", "output.": "lm_head."}
