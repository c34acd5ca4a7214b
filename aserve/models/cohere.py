"""Command R and R7B (Cohere 2024): attention and MLP in parallel behind one layer norm, scaled logits.

Command R+ also normalises heads; in R7B, layers without a window have no positions. Both are in the spec.
"""

from __future__ import annotations

from typing import ClassVar

from aserve.layers.weights import WeightRow, WeightTarget, expand_weights
from aserve.models.llama import ATTENTION_WEIGHTS, HEAD_NORM_WEIGHTS, MLP_WEIGHTS, Llama


class Cohere(Llama):
    """Satisfies ``Model``."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (
        *ATTENTION_WEIGHTS,
        *MLP_WEIGHTS,
        WeightRow("model.layers.*.input_layernorm", "layers.*.input_norm"),
        WeightRow("model.norm", "norm"),
    )

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = super().weight_targets()
        if self.spec.qk_norm == "none":
            return targets
        return targets | expand_weights(self._decoder, HEAD_NORM_WEIGHTS, range(self.spec.num_layers))
