"""RMS normalisation with its weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aserve.layers.context import LayerContext


class RmsNorm:
    """Normalises the last dimension, of ``size`` channels; satisfies ``Loadable``.

    With ``unit_offset`` the scale is 1 + weight, kept in float32: the kernels then round once, after the scale.
    """

    __slots__ = ("_add_norm", "_dtype", "_eps", "_norm", "_unit_offset", "_weight")

    def __init__(self, size: int, eps: float, ctx: LayerContext, *, unit_offset: bool = False) -> None:
        self._weight = torch.empty(size, dtype=torch.float32 if unit_offset else ctx.dtype, device=ctx.device)
        self._dtype = ctx.dtype
        self._unit_offset = unit_offset
        self._eps = eps
        self._norm = ctx.kernels.rms_norm
        self._add_norm = ctx.kernels.fused_add_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` [..., size], a new tensor."""
        return self._norm(x, self._weight, self._eps)

    @property
    def weight(self) -> Tensor:
        """[size], of the dtype in which the norm is scaled."""
        return self._weight

    def in_place(self, x: Tensor) -> None:
        """Normalise ``x`` [..., size], whose rows may be strided."""
        self._norm(x, self._weight, self._eps, out=x)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual); both arguments may be overwritten."""
        return self._add_norm(x, residual, self._weight, self._eps)

    def tensor_shapes(self, shard: str) -> Mapping[str, tuple[int, ...]]:
        return {"weight": tuple(self._weight.shape)}

    def load(self, shard: str, name: str, tensor: Tensor) -> None:
        if self._unit_offset:
            tensor = tensor.to(self._dtype).float() + 1  # rounded first, as a model in that dtype holds it
        self._weight.copy_(tensor)

    def finish_loading(self) -> None:
        """Nothing to do: the weight is used as it is."""
