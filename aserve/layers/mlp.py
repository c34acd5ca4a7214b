"""The gated feed-forward block of Llama, Gemma and their relatives (SwiGLU and GeGLU, Shazeer 2020)."""

from __future__ import annotations

from torch import Tensor

from aserve.core.model_spec import ModelSpec
from aserve.layers.context import LayerContext
from aserve.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMlp:
    """down(activation(gate(x)) * up(x)), with gate and up multiplied as one matrix."""

    __slots__ = ("_activate_and_mul", "down_proj", "gate_up_proj")

    def __init__(self, name: str, spec: ModelSpec, ctx: LayerContext) -> None:
        hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        outs = {"gate": inner, "up": inner}
        self.gate_up_proj = MergedColumnParallelLinear(f"{name}.gate_up_proj", hidden, outs, ctx, bias=bias)
        self.down_proj = RowParallelLinear(f"{name}.down_proj", inner, hidden, ctx, bias=bias)
        kernels = ctx.kernels
        self._activate_and_mul = kernels.silu_and_mul if spec.activation == "silu" else kernels.gelu_tanh_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, H], a new tensor, for ``x`` [T, H]."""
        return self.down_proj(self._activate_and_mul(self.gate_up_proj(x)))
