"""The gated feed-forward block of Llama and its relatives (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from torch import Tensor

from aserve.layers.context import LayerContext
from aserve.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMlp:
    """down(silu(gate(x)) * up(x)), with gate and up multiplied as one matrix."""

    __slots__ = ("_silu_and_mul", "down_proj", "gate_up_proj")

    def __init__(
        self, name: str, hidden_size: int, intermediate_size: int, ctx: LayerContext, *, bias: bool = False
    ) -> None:
        outs = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(f"{name}.gate_up_proj", hidden_size, outs, ctx, bias=bias)
        self.down_proj = RowParallelLinear(f"{name}.down_proj", intermediate_size, hidden_size, ctx, bias=bias)
        self._silu_and_mul = ctx.kernels.silu_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, H], a new tensor, for ``x`` [T, H]."""
        return self.down_proj(self._silu_and_mul(self.gate_up_proj(x)))
