"""Linear layers, each of which knows which slice of the checkpoint's matrix its rank holds.

What a weight is (plain, packed, quantised) is the business of the ``LinearMethod`` that the context's scheme picks.
The layers differ in how they cut: by rows (output features), by columns (input features), several matrices fused into
one, or attention heads. All are built without a process group when the context's group is ``SoloGroup``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from aserve.core.errors import ModelLoadError
from aserve.layers.context import LayerContext
from aserve.quantization.method import MatrixSlice


class Shard(NamedTuple):
    """One checkpoint matrix of ``num_rows`` whole rows, of which this rank takes ``part``."""

    num_rows: int
    part: MatrixSlice


class SlicedWeight:
    """The matrix and bias of a linear layer on this rank; filled shard by shard (satisfies ``Loadable``).

    A checkpoint that stores several shards as one matrix names them all: "gate+up".
    """

    __slots__ = ("_added_bias", "_apply", "_bias", "_method", "_name", "_num_columns", "_orders", "_shards")

    def __init__(
        self,
        name: str,
        shards: Mapping[str, Shard],
        num_columns: int,
        ctx: LayerContext,
        *,
        bias: bool,
        add_bias: bool = True,
        orders: Mapping[str, Tensor] | None = None,
    ) -> None:
        """``num_columns`` is that of the whole matrix; with ``add_bias`` off the bias is loaded and not used.

        ``orders`` says, by the shard's name, which of the checkpoint's rows becomes which: [rows] int64.

        Raises ModelLoadError if the method cannot cut the matrix where the shards say.
        """
        parts = [shard.part for shard in shards.values()]
        num_local_rows = sum(part.rows[1] - part.rows[0] for part in parts)
        start, stop = parts[0].columns
        self._name, self._orders = name, orders or {}
        self._method = ctx.quant.method_for(name, ctx.kernels)
        self._check_cuts(name, shards, num_columns)
        self._method.create_weights(num_local_rows, stop - start, dtype=ctx.dtype, device=ctx.device)
        self._shards = shards
        self._num_columns = num_columns
        self._apply = self._method.apply
        self._bias = torch.empty(num_local_rows, dtype=ctx.dtype, device=ctx.device) if bias else None
        self._added_bias = self._bias if add_bias else None

    def _check_cuts(self, name: str, shards: Mapping[str, Shard], num_columns: int) -> None:
        size = self._method.group_size
        for shard in shards.values():
            part = shard.part
            cuts = [c for c in part.rows if c != shard.num_rows] + [c for c in part.columns if c != num_columns]
            if any(cut % size for cut in cuts):
                raise ModelLoadError(f"{name} can only be cut at multiples of {size}, so not over this many devices")

    def tensor_shapes(self, shard: str) -> Mapping[str, tuple[int, ...]]:
        num_rows = sum(self._shards[part].num_rows for part in shard.split("+"))
        shapes = dict(self._method.tensor_shapes(num_rows, self._num_columns))
        if self._bias is not None:
            shapes["bias"] = (num_rows,)
        return shapes

    def load(self, shard: str, name: str, tensor: Tensor) -> None:
        order = self._orders.get(shard)
        parts = shard.split("+")
        if (order is not None or len(parts) > 1) and name not in ("weight", "bias"):
            raise ModelLoadError(f"{self._name}: rows of a fused matrix cannot be told apart in its {name}")
        if order is not None:
            tensor = tensor[order]
        first = 0
        for part in parts:
            num_rows = self._shards[part].num_rows
            self._load_shard(part, name, tensor[first : first + num_rows] if len(parts) > 1 else tensor)
            first += num_rows

    def _load_shard(self, shard: str, name: str, tensor: Tensor) -> None:
        part = self._shards[shard].part
        if name == "bias":
            assert self._bias is not None
            start, stop = part.rows
            self._bias[part.offset : part.offset + stop - start].copy_(tensor[start:stop])
        else:
            self._method.load(name, part, tensor)

    def finish_loading(self) -> None:
        self._method.finish_loading()

    def apply(self, x: Tensor) -> Tensor:
        """Return ``x`` [T, columns] times the matrix plus the bias: [T, rows]."""
        return self._apply(x, self._added_bias)


class ColumnParallelLinear:
    """[T, in] to this rank's share of [T, out]: cut by output features."""

    __slots__ = ("weights",)

    def __init__(self, name: str, num_in: int, num_out: int, ctx: LayerContext, *, bias: bool = False) -> None:
        shards = {"": Shard(num_out, MatrixSlice(even_share(name, num_out, ctx), (0, num_in)))}
        self.weights = SlicedWeight(name, shards, num_in, ctx, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.weights.apply(x)


class MergedColumnParallelLinear:
    """Several column-parallel matrices with the same input, multiplied as one; outputs in the order of ``num_outs``."""

    __slots__ = ("weights",)

    def __init__(
        self, name: str, num_in: int, num_outs: Mapping[str, int], ctx: LayerContext, *, bias: bool = False
    ) -> None:
        shares = {shard: even_share(name, num_out, ctx) for shard, num_out in num_outs.items()}
        self.weights = SlicedWeight(name, _stack(num_outs, shares, num_in), num_in, ctx, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.weights.apply(x)


class QKVParallelLinear:
    """Query, key and value projections as one matrix, cut by heads.

    Each rank holds ``num_heads`` query heads, then ``num_kv_heads`` key heads, then as many value heads, of
    ``head_dim`` rows each. With more ranks than KV heads, each KV head is held by several ranks.
    """

    __slots__ = ("num_heads", "num_kv_heads", "weights")

    def __init__(
        self,
        name: str,
        num_in: int,
        heads: tuple[int, int, int],
        ctx: LayerContext,
        *,
        bias: bool = False,
        orders: Mapping[str, Tensor] | None = None,
    ) -> None:
        """``heads`` is (query heads, KV heads, head size) of the whole model; ``orders`` as in ``SlicedWeight``."""
        num_heads, num_kv_heads, head_dim = heads
        rank, size = ctx.group.rank, ctx.group.size
        first, last = even_share(name, num_heads, ctx)
        if size > num_kv_heads and size % num_kv_heads == 0:
            kv_first = rank * num_kv_heads // size
            kv_last = kv_first + 1
        else:
            kv_first, kv_last = even_share(name, num_kv_heads, ctx)
        self.num_heads, self.num_kv_heads = last - first, kv_last - kv_first
        num_outs = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        kv = (kv_first * head_dim, kv_last * head_dim)
        shares = {"q": (first * head_dim, last * head_dim), "k": kv, "v": kv}
        shards = _stack(num_outs, shares, num_in)
        self.weights = SlicedWeight(name, shards, num_in, ctx, bias=bias, orders=orders)

    def __call__(self, x: Tensor) -> Tensor:
        return self.weights.apply(x)


class RowParallelLinear:
    """This rank's share of [T, in] to the whole [T, out]: cut by input features, summed over the ranks."""

    __slots__ = ("_group", "weights")

    def __init__(self, name: str, num_in: int, num_out: int, ctx: LayerContext, *, bias: bool = False) -> None:
        shards = {"": Shard(num_out, MatrixSlice((0, num_out), even_share(name, num_in, ctx)))}
        # Summed over the ranks, the bias must count once.
        self.weights = SlicedWeight(name, shards, num_in, ctx, bias=bias, add_bias=ctx.group.rank == 0)
        self._group = ctx.group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self.weights.apply(x))


def even_share(name: str, count: int, ctx: LayerContext) -> tuple[int, int]:
    """Return this rank's half-open range of ``count`` things. Raises ModelLoadError if they do not divide evenly."""
    size = ctx.group.size
    if count % size:
        raise ModelLoadError(f"{name}: {count} cannot be divided evenly over {size} devices")
    share = count // size
    return ctx.group.rank * share, (ctx.group.rank + 1) * share


def _stack(num_outs: Mapping[str, int], shares: Mapping[str, tuple[int, int]], num_in: int) -> dict[str, Shard]:
    """Place the shards' rows one below the other."""
    shards: dict[str, Shard] = {}
    offset = 0
    for shard, num_rows in num_outs.items():
        rows = shares[shard]
        shards[shard] = Shard(num_rows, MatrixSlice(rows, (0, num_in), offset))
        offset += rows[1] - rows[0]
    return shards
