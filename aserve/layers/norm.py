"""Normalisation of the last dimension: by its root mean square, or by mean and variance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from aserve.core.model_spec import ModelSpec
from aserve.layers.context import LayerContext


class Norm(Protocol):
    """What a layer of the decoder calls. Satisfies ``Loadable``."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` [..., size], a new tensor."""
        ...

    def in_place(self, x: Tensor) -> None:
        """Normalise ``x`` [..., size], whose rows may be strided."""
        ...

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual); both arguments may be overwritten."""
        ...


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


class LayerNorm:
    """Layer normalisation (Ba et al. 2016) of ``size`` channels, by torch's kernels; satisfies ``Loadable``."""

    __slots__ = ("_bias", "_eps", "_shape", "_weight")

    def __init__(self, size: int, eps: float, ctx: LayerContext, *, bias: bool) -> None:
        self._weight = torch.empty(size, dtype=ctx.dtype, device=ctx.device)
        self._bias = torch.empty(size, dtype=ctx.dtype, device=ctx.device) if bias else None
        self._shape = (size,)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` [..., size], a new tensor."""
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)

    def in_place(self, x: Tensor) -> None:
        """Normalise ``x`` [..., size], whose rows may be strided."""
        x.copy_(self(x))

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual); both arguments may be overwritten."""
        total = residual.add_(x)
        return self(total), total

    def tensor_shapes(self, shard: str) -> Mapping[str, tuple[int, ...]]:
        return {"weight": self._shape} | ({} if self._bias is None else {"bias": self._shape})

    def load(self, shard: str, name: str, tensor: Tensor) -> None:
        target = self._weight if name == "weight" else self._bias
        assert target is not None
        target.copy_(tensor)

    def finish_loading(self) -> None:
        """Nothing to do: weight and bias are used as they are."""


class LayerNormByHead:
    """Layer normalisation of each head of ``x`` [T, heads, D] with a weight of its own; satisfies ``Loadable``.

    ``channels`` [D] says which stored channel becomes which. ``first`` is this rank's first head of ``num_heads``.
    """

    __slots__ = ("_channels", "_eps", "_first", "_num_heads", "_weight")

    def __init__(self, heads: tuple[int, int, int], eps: float, ctx: LayerContext, channels: Tensor) -> None:
        """``heads`` is (heads of the whole model, this rank's first, how many it has)."""
        self._num_heads, self._first, count = heads
        self._weight = torch.empty(count, len(channels), dtype=torch.float32, device=ctx.device)
        self._channels = channels
        self._eps = eps

    def in_place(self, x: Tensor) -> None:
        """Normalise ``x`` [T, heads, D], whose rows may be strided; rounds once, after the scale."""
        normed = functional.layer_norm(x.float(), (x.shape[-1],), eps=self._eps)
        x.copy_(normed.mul_(self._weight))

    def tensor_shapes(self, shard: str) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self._num_heads, len(self._channels))}

    def load(self, shard: str, name: str, tensor: Tensor) -> None:
        part = tensor[self._first : self._first + len(self._weight)]
        self._weight.copy_(part[:, self._channels])

    def finish_loading(self) -> None:
        """Nothing to do: the weight is used as it is."""


def hidden_norm(spec: ModelSpec, ctx: LayerContext) -> RmsNorm | LayerNorm:
    """Return a norm over hidden states, of the kind that the model has."""
    if spec.norm == "rms":
        return RmsNorm(spec.hidden_size, spec.norm_eps, ctx, unit_offset=spec.norm_unit_offset)
    return LayerNorm(spec.hidden_size, spec.norm_eps, ctx, bias=spec.norm == "layer_with_bias")
