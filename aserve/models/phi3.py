"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama, stored with fused projections.

Some have LongRoPE, and some rotate a part of each head; both are in the spec.
"""

from __future__ import annotations

from typing import ClassVar

from aserve.layers.weights import WeightRow
from aserve.models.llama import FUSED_MLP_WEIGHTS, NORM_WEIGHTS, Llama


class Phi3(Llama):
    """Satisfies ``Model``."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (
        WeightRow("model.layers.*.self_attn.qkv_proj", "layers.*.attention.qkv_proj.weights", "q+k+v"),
        WeightRow("model.layers.*.self_attn.o_proj", "layers.*.attention.o_proj.weights"),
        *FUSED_MLP_WEIGHTS,
        *NORM_WEIGHTS,
    )
