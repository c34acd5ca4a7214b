"""Linear layers: every rank's slice put together is the whole product, packed or not, fused or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from aserve.core.errors import ModelLoadError
from aserve.layers.context import LayerContext
from aserve.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    SlicedWeight,
)
from aserve_kernels.kernel_set import PackedMatrix

Context = Callable[..., LayerContext]
DTYPES = [torch.float32, torch.bfloat16]


def fill(weights: SlicedWeight, matrices: dict[str, tuple[Tensor, Tensor | None]]) -> None:
    """Load whole matrices and biases, as the loader does."""
    for shard, (matrix, bias) in matrices.items():
        shapes = weights.tensor_shapes(shard)
        assert shapes["weight"] == tuple(matrix.shape)
        weights.load(shard, "weight", matrix)
        assert ("bias" in shapes) == (bias is not None)
        if bias is not None:
            assert shapes["bias"] == tuple(bias.shape)
            weights.load(shard, "bias", bias)
    weights.finish_loading()


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def close(got: Tensor, want: Tensor) -> bool:
    assert got.dtype == want.dtype
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_columns(context: Context, size: int, biased: bool, dtype: torch.dtype, num_tokens: int) -> None:
    x, matrix = draw(num_tokens, 20, dtype=dtype), draw(36, 20, dtype=dtype)
    bias = draw(36, dtype=dtype) if biased else None
    parts = []
    for rank in range(size):
        layer = ColumnParallelLinear("layer", 20, 36, context(rank, size, dtype), bias=biased)
        fill(layer.weights, {"": (matrix, bias)})
        parts.append(layer(x))
    assert close(torch.cat(parts, dim=1), functional.linear(x, matrix, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_count_the_bias_once(context: Context, size: int, biased: bool, dtype: torch.dtype) -> None:
    x, matrix = draw(3, 32, dtype=dtype), draw(10, 32, dtype=dtype)
    bias = draw(10, dtype=dtype) if biased else None
    total = torch.zeros(3, 10)
    for rank in range(size):
        layer = RowParallelLinear("layer", 32, 10, context(rank, size, dtype), bias=biased)
        fill(layer.weights, {"": (matrix, bias)})
        share = 32 // size
        total += layer(x[:, rank * share : (rank + 1) * share].contiguous()).float()
    want = functional.linear(x.float(), matrix.float(), None if bias is None else bias.float())
    assert torch.allclose(total, want, rtol=3e-2, atol=1e-1 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2])
def test_merged(context: Context, size: int, dtype: torch.dtype) -> None:
    x = draw(3, 16, dtype=dtype)
    gate, up = draw(12, 16, dtype=dtype), draw(8, 16, dtype=dtype)
    parts = []
    for rank in range(size):
        layer = MergedColumnParallelLinear("layer", 16, {"gate": 12, "up": 8}, context(rank, size, dtype))
        fill(layer.weights, {"up": (up, None), "gate": (gate, None)})  # in any order
        parts.append(layer(x).split((12 // size, 8 // size), dim=1))
    assert close(torch.cat([part[0] for part in parts], dim=1), functional.linear(x, gate))
    assert close(torch.cat([part[1] for part in parts], dim=1), functional.linear(x, up))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_heads(context: Context, size: int, biased: bool) -> None:
    """Each rank's query heads find their own KV head among the rank's; KV heads are repeated beyond their number."""
    num_heads, num_kv_heads, head_dim = 8, 4, 3
    x = draw(2, 16, dtype=torch.float32)
    rows = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
    matrices = {
        s: (draw(n, 16, dtype=torch.float32), draw(n, dtype=torch.float32) if biased else None) for s, n in rows.items()
    }
    whole = {s: functional.linear(x, m, b).view(2, -1, head_dim) for s, (m, b) in matrices.items()}
    seen = 0
    for rank in range(size):
        layer = QKVParallelLinear("qkv", 16, (num_heads, num_kv_heads, head_dim), context(rank, size), bias=biased)
        fill(layer.weights, matrices)
        counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        q, k, v = layer(x).view(2, -1, head_dim).split(counts, dim=1)
        for head in range(layer.num_heads):
            kv = head // (layer.num_heads // layer.num_kv_heads)
            assert close(q[:, head], whole["q"][:, seen])
            assert close(k[:, kv], whole["k"][:, seen // 2])
            assert close(v[:, kv], whole["v"][:, seen // 2])
            seen += 1
    assert seen == num_heads


def test_what_cannot_be_divided_is_refused(context: Context) -> None:
    with pytest.raises(ModelLoadError, match="9 cannot be divided evenly over 2"):
        ColumnParallelLinear("model.layers.0.odd", 4, 9, context(0, 2))
    with pytest.raises(ModelLoadError, match="3 cannot be divided evenly over 2"):
        QKVParallelLinear("qkv", 8, (4, 3, 2), context(0, 2))


def test_a_method_with_groups_is_only_cut_at_their_borders(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.quantization.unquantized.UnquantizedMethod.group_size", 16)
    RowParallelLinear("layer", 64, 6, context(1, 4))
    RowParallelLinear("layer", 24, 6, context(0, 1))
    with pytest.raises(ModelLoadError, match="multiples of 16"):
        RowParallelLinear("layer", 24, 6, context(0, 2))


def test_a_packed_matrix_replaces_the_plain_one(context: Context) -> None:
    packed: list[Tensor] = []

    def pack(weight: Tensor) -> PackedMatrix:
        packed.append(weight)
        return lambda x, bias: functional.linear(x, weight, bias) + 1

    surroundings = context()
    surroundings = dataclasses.replace(surroundings, kernels=surroundings.kernels.replace(pack=pack))
    layer = ColumnParallelLinear("layer", 64, 96, surroundings)
    matrix = draw(96, 64, dtype=torch.float32)
    fill(layer.weights, {"": (matrix, None)})
    method: Any = layer.weights._method
    assert method._weight is None
    assert torch.equal(packed[0], matrix)
    x = draw(4, 64, dtype=torch.float32)
    assert close(layer(x), functional.linear(x, matrix) + 1)
