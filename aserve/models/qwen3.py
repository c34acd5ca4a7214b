"""Qwen3, the dense models (Qwen team 2025): Llama plus a norm over each head of queries and keys."""

from __future__ import annotations

from typing import ClassVar

from aserve.layers.weights import WeightRow
from aserve.models.llama import HEAD_NORM_WEIGHTS, LAYER_WEIGHTS, Llama


class Qwen3(Llama):
    """Satisfies ``Model``; the norms themselves are in the spec."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (*LAYER_WEIGHTS, *HEAD_NORM_WEIGHTS)
