"""Models whose feed-forward blocks are mixtures of experts: Mixtral, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from typing import ClassVar

from aserve.layers.weights import WeightRow, WeightTarget, expand_weights
from aserve.models.llama import ATTENTION_WEIGHTS, HEAD_NORM_WEIGHTS, MLP_WEIGHTS, NORM_WEIGHTS, Llama


class Mixtral(Llama):
    """Satisfies ``Model`` (Jiang et al. 2024)."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (*ATTENTION_WEIGHTS, *NORM_WEIGHTS)
    EXPERTS: ClassVar[tuple[WeightRow, ...]] = (
        WeightRow("model.layers.*.block_sparse_moe.gate", "layers.*.mlp.router"),
        WeightRow("model.layers.*.block_sparse_moe.experts.#.w1", "layers.*.mlp.experts", "#.gate"),
        WeightRow("model.layers.*.block_sparse_moe.experts.#.w3", "layers.*.mlp.experts", "#.up"),
        WeightRow("model.layers.*.block_sparse_moe.experts.#.w2", "layers.*.mlp.experts", "#.down"),
    )

    def weight_targets(self) -> dict[str, WeightTarget]:
        experts = self.spec.experts
        assert experts is not None, "the family's row says that there are experts"
        dense = [n for n, has_experts in enumerate(experts.by_layer) if not has_experts]
        sparse = [n for n, has_experts in enumerate(experts.by_layer) if has_experts]
        return {
            **super().weight_targets(),
            **expand_weights(self._decoder, MLP_WEIGHTS, dense),
            **expand_weights(self._decoder, self.EXPERTS, sparse, num_experts=experts.num_experts),
        }


class Qwen3Moe(Mixtral):
    """Satisfies ``Model`` (Qwen team 2025); single layers may have no experts."""

    WEIGHTS: ClassVar[tuple[WeightRow, ...]] = (*Mixtral.WEIGHTS, *HEAD_NORM_WEIGHTS)
    EXPERTS: ClassVar[tuple[WeightRow, ...]] = (
        WeightRow("model.layers.*.mlp.gate", "layers.*.mlp.router"),
        WeightRow("model.layers.*.mlp.experts.#.gate_proj", "layers.*.mlp.experts", "#.gate"),
        WeightRow("model.layers.*.mlp.experts.#.up_proj", "layers.*.mlp.experts", "#.up"),
        WeightRow("model.layers.*.mlp.experts.#.down_proj", "layers.*.mlp.experts", "#.down"),
    )


class Qwen2Moe(Mixtral):
    """Satisfies ``Model`` (Qwen team 2024); beside the experts, one MLP computes every token."""

    EXPERTS: ClassVar[tuple[WeightRow, ...]] = (
        *Qwen3Moe.EXPERTS,
        WeightRow("model.layers.*.mlp.shared_expert.gate_proj", "layers.*.mlp.shared.gate_up_proj.weights", "gate"),
        WeightRow("model.layers.*.mlp.shared_expert.up_proj", "layers.*.mlp.shared.gate_up_proj.weights", "up"),
        WeightRow("model.layers.*.mlp.shared_expert.down_proj", "layers.*.mlp.shared.down_proj.weights"),
        WeightRow("model.layers.*.mlp.shared_expert_gate", "layers.*.mlp.shared_gate"),
    )
