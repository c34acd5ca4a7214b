"""A mixture of experts (Shazeer et al. 2017): of many feed-forward blocks, a few compute each token.

Tokens are sorted by their experts, so that each expert's matrices are read once per step. Ranks share every expert:
each holds a slice of its intermediate channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from aserve.core.errors import ModelLoadError
from aserve.core.experts_spec import ExpertsSpec
from aserve.core.model_spec import ModelSpec
from aserve.layers.context import LayerContext
from aserve.layers.linear import even_share
from aserve.layers.mlp import GatedMlp


class Router:
    """Chooses the experts of each token, by the largest of a product's softmax; satisfies ``Loadable``."""

    __slots__ = ("_linear", "_num_active", "_renormalize", "_weight")

    def __init__(self, hidden_size: int, experts: ExpertsSpec, ctx: LayerContext) -> None:
        self._weight = torch.empty(experts.num_experts, hidden_size, dtype=ctx.dtype, device=ctx.device)
        self._linear = ctx.kernels.linear
        self._num_active = experts.num_active
        self._renormalize = experts.renormalize

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (weights in x's dtype, experts int64), both [T, active], for ``x`` [T, H]."""
        scores = functional.softmax(self._linear(x, self._weight, None), dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self._num_active, dim=-1)
        if self._renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def tensor_shapes(self, shard: str) -> Mapping[str, tuple[int, ...]]:
        return {"weight": tuple(self._weight.shape)}

    def load(self, shard: str, name: str, tensor: Tensor) -> None:
        self._weight.copy_(tensor)

    def finish_loading(self) -> None:
        """Nothing to do: the weight is used as it is."""


class ExpertMatrices:
    """The matrices of all experts on this rank; satisfies ``Loadable`` with shards "3.gate", "3.up" and "3.down".

    Attributes:
        gate_up: [experts, 2 I, H], gates above ups.
        down: [experts, H, I].
    """

    __slots__ = ("_hidden_size", "_inner", "_num_local", "_rows", "down", "gate_up")

    def __init__(self, name: str, hidden_size: int, experts: ExpertsSpec, ctx: LayerContext) -> None:
        self._hidden_size, self._inner = hidden_size, experts.intermediate_size
        self._rows = even_share(name, experts.intermediate_size, ctx)
        self._num_local = self._rows[1] - self._rows[0]
        options = {"dtype": ctx.dtype, "device": ctx.device}
        self.gate_up = torch.empty(experts.num_experts, 2 * self._num_local, hidden_size, **options)
        self.down = torch.empty(experts.num_experts, hidden_size, self._num_local, **options)

    def tensor_shapes(self, shard: str) -> Mapping[str, tuple[int, ...]]:
        shape = (self._inner, self._hidden_size)
        return {"weight": shape[::-1] if shard.endswith("down") else shape}

    def load(self, shard: str, name: str, tensor: Tensor) -> None:
        expert, _, part = shard.partition(".")
        first, last = self._rows
        if part == "down":
            self.down[int(expert)].copy_(tensor[:, first:last])
        else:
            offset = 0 if part == "gate" else self._num_local
            self.gate_up[int(expert), offset : offset + self._num_local].copy_(tensor[first:last])

    def finish_loading(self) -> None:
        """Nothing to do: the matrices are used as they are."""


class Gate:
    """sigmoid of one product per token, [H] to a number; satisfies ``Loadable``."""

    __slots__ = ("_linear", "_weight")

    def __init__(self, hidden_size: int, ctx: LayerContext) -> None:
        self._weight = torch.empty(1, hidden_size, dtype=ctx.dtype, device=ctx.device)
        self._linear = ctx.kernels.linear

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, 1] for ``x`` [T, H]."""
        return self._linear(x, self._weight, None).sigmoid_()

    def tensor_shapes(self, shard: str) -> Mapping[str, tuple[int, ...]]:
        return {"weight": tuple(self._weight.shape)}

    def load(self, shard: str, name: str, tensor: Tensor) -> None:
        self._weight.copy_(tensor)

    def finish_loading(self) -> None:
        """Nothing to do: the weight is used as it is."""


class Mixture:
    """The feed-forward block of a layer with experts, and with an MLP beside them that computes every token."""

    __slots__ = (
        "_activate_and_mul",
        "_group",
        "_grouped_linear",
        "_numbers",
        "experts",
        "router",
        "shared",
        "shared_gate",
    )

    def __init__(self, name: str, spec: ModelSpec, experts: ExpertsSpec, ctx: LayerContext) -> None:
        """Raises ModelLoadError when the experts' matrices are quantised, or cannot be divided over the ranks."""
        if spec.quant_method is not None:
            raise ModelLoadError(f"{name}: experts that are quantized with {spec.quant_method!r} are not supported")
        self.router = Router(spec.hidden_size, experts, ctx)
        self.experts = ExpertMatrices(name, spec.hidden_size, experts, ctx)
        has_shared = experts.shared_size > 0
        self.shared = GatedMlp(f"{name}.shared", spec, ctx, inner=experts.shared_size) if has_shared else None
        self.shared_gate = Gate(spec.hidden_size, ctx) if has_shared else None
        self._numbers = torch.arange(experts.num_experts, device=ctx.device)
        self._group = ctx.group
        self._grouped_linear = ctx.kernels.grouped_linear
        self._activate_and_mul = ctx.kernels.silu_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, H], a new tensor, for ``x`` [T, H]."""
        out = self._group.all_reduce(self._by_chosen(x))
        if self.shared is not None and self.shared_gate is not None:
            out += self.shared(x).mul_(self.shared_gate(x))
        return out

    def _by_chosen(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        numbers, order = chosen.flatten().sort(stable=True)  # order: places in [T * active], by expert
        ends = torch.searchsorted(numbers, self._numbers, right=True, out_int32=True)
        by_expert = self._compute(x, order // chosen.shape[1], ends)
        by_token = torch.empty_like(by_expert)
        by_token[order] = by_expert
        del by_expert
        return by_token.view(*chosen.shape, -1).mul_(weights[:, :, None]).sum(dim=1)

    def _compute(self, x: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        """Return what each expert makes of its rows of ``x``, which ``rows`` [R] lists expert by expert: [R, H]."""
        linear, experts = self._grouped_linear, self.experts
        return linear(self._activate_and_mul(linear(x[rows], experts.gate_up, ends)), experts.down, ends)
