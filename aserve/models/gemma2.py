"""Gemma 2 (Gemma Team 2024): Llama with a norm on both sides of attention and MLP, and capped scores and logits.

Every second layer has a window. Norms scale by 1 + weight; that, their places, the caps, the windows and the scale of
embeddings are in the spec.
"""

from __future__ import annotations

from typing import ClassVar

from aserve.layers.weights import WeightRow
from aserve.models.llama import LAYER_WEIGHTS, Llama


class Gemma2(Llama):
    """Satisfies ``Model``."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (
        *LAYER_WEIGHTS,
        WeightRow("model.layers.*.pre_feedforward_layernorm", "layers.*.pre_mlp_norm"),
        WeightRow("model.layers.*.post_feedforward_layernorm", "layers.*.post_mlp_norm"),
    )
