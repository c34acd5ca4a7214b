"""The feed-forward blocks: gated (SwiGLU and GeGLU, Shazeer 2020) and plain."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional

from aserve.core.model_spec import ModelSpec
from aserve.layers.context import LayerContext
from aserve.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear


class GatedMlp:
    """down(activation(gate(x)) * up(x)), with gate and up multiplied as one matrix."""

    __slots__ = ("_activate_and_mul", "down_proj", "gate_up_proj")

    def __init__(self, name: str, spec: ModelSpec, ctx: LayerContext, *, inner: int | None = None) -> None:
        """``inner`` is the intermediate size, if it is not that of the model."""
        hidden, inner, bias = spec.hidden_size, inner or spec.intermediate_size, spec.mlp_bias
        outs = {"gate": inner, "up": inner}
        self.gate_up_proj = MergedColumnParallelLinear(f"{name}.gate_up_proj", hidden, outs, ctx, bias=bias)
        self.down_proj = RowParallelLinear(f"{name}.down_proj", inner, hidden, ctx, bias=bias)
        kernels = ctx.kernels
        self._activate_and_mul = kernels.silu_and_mul if spec.activation == "silu" else kernels.gelu_tanh_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, H], a new tensor, for ``x`` [T, H]."""
        return self.down_proj(self._activate_and_mul(self.gate_up_proj(x)))


class PlainMlp:
    """down(activation(up(x)))."""

    __slots__ = ("_activate", "down_proj", "up_proj")

    def __init__(self, name: str, spec: ModelSpec, ctx: LayerContext) -> None:
        hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        self.up_proj = ColumnParallelLinear(f"{name}.up_proj", hidden, inner, ctx, bias=bias)
        self.down_proj = RowParallelLinear(f"{name}.down_proj", inner, hidden, ctx, bias=bias)
        self._activate = functional.silu if spec.activation == "silu" else partial(functional.gelu, approximate="tanh")

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, H], a new tensor, for ``x`` [T, H]."""
        # No name for the wide product: it is let go of as soon as it is activated.
        return self.down_proj(self._activate(self.up_proj(x)))
