"""StarCoder 2 (Lozhkov et al. 2024): layer norms and an MLP of two matrices, both with biases."""

from __future__ import annotations

from typing import ClassVar

from aserve.layers.weights import WeightRow
from aserve.models.llama import ATTENTION_WEIGHTS, NORM_WEIGHTS, Llama


class Starcoder2(Llama):
    """Satisfies ``Model``."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (
        *ATTENTION_WEIGHTS,
        *NORM_WEIGHTS,
        WeightRow("model.layers.*.mlp.c_fc", "layers.*.mlp.up_proj.weights"),
        WeightRow("model.layers.*.mlp.c_proj", "layers.*.mlp.down_proj.weights"),
    )
