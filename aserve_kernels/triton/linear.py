"""Matrix products: a kernel that streams the matrix for one to four tokens, cuBLAS beyond; ``kernel_set.Linear``.

With so few tokens a product is as fast as its matrix can be read. All linears of a decode step of a 7B model take
3.91 ms with cuBLAS on an H200 for 1 to 16 tokens, and 3.37 with this kernel, norms included (4.2 TB/s).
"""

# Triton functions have no types that Python tools know: their parameters are pointers, scalars and constants.
# ruff: noqa: ANN001, ANN202, PLR0917
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from aserve_kernels.triton.dependent_launch import let_next_start, overlaps, wait_for_previous
from aserve_kernels.triton.sizes import next_power_of_2

MAX_TOKENS = 4
"""Beyond this many the products of a lane outweigh the loads, and tensor cores are worth their set-up."""


class Tile(NamedTuple):
    """Rows of the matrix that a program owns, columns it reads at a time, and its warps."""

    rows: int
    columns: int
    num_warps: int


# What was fastest for the matrices of a 7B model on an H200 (28 layers in one CUDA graph, TB/s): qkv 3.77, output 3.43,
# gate and up 4.37, down 4.27, head 4.58. Long rows want fewer programs with more in flight each.
_MANY_ROWS = Tile(4, 512, 2)
_LONG_ROWS = Tile(4, 1024, 4)
_FEW_ROWS = Tile(8, 512, 8)
_OTHERS = Tile(4, 512, 4)


def _tile(num_rows: int, num_columns: int) -> Tile:
    if num_rows >= 16384:
        return _MANY_ROWS
    if num_columns >= 8192:
        return _LONG_ROWS
    return _FEW_ROWS if num_rows <= 4096 else _OTHERS


@triton.jit
def _store_row(
    acc, token, bias_ptr, out_ptr, rows, num_rows, num_tokens, HAS_BIAS: tl.constexpr
):  # acc [ROWS, COLUMNS]
    result = tl.sum(acc, axis=1)
    if HAS_BIAS:
        result += tl.load(bias_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    stored = (rows < num_rows) & (token < num_tokens)
    tl.store(out_ptr + token * num_rows + rows, result.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _stream_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    num_rows,
    num_columns,
    num_tokens,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of every token; the next columns of the matrix are on their way while these are multiplied.

    TOKENS is 1, 2 or 4. Each token has sums of its own: one tensor of three dimensions would be laid out otherwise than
    the matrix, and moved through shared memory in every round.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    there = (rows < num_rows)[:, None]
    weight_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    let_next_start(PDL)
    inside = there & (columns < num_columns)[None, :]
    weight = tl.load(weight_ptrs, mask=inside, other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    sums0 = tl.zeros([ROWS, COLUMNS], tl.float32)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    for first in range(0, num_columns, COLUMNS):
        later = first + COLUMNS + columns
        coming_ptrs = weight_ptrs + (first + COLUMNS)
        inside = there & (later < num_columns)[None, :]
        coming = tl.load(coming_ptrs, mask=inside, other=0.0, eviction_policy="evict_first")
        w = weight.to(tl.float32)
        x_ptrs = x_ptr + first + columns
        used = first + columns < num_columns
        sums0 += w * tl.load(x_ptrs, mask=used, other=0.0).to(tl.float32)[None, :]
        if TOKENS > 1:
            x = tl.load(x_ptrs + x_stride, mask=used & (num_tokens > 1), other=0.0)
            sums1 += w * x.to(tl.float32)[None, :]
        if TOKENS > 2:
            x = tl.load(x_ptrs + 2 * x_stride, mask=used & (num_tokens > 2), other=0.0)
            sums2 += w * x.to(tl.float32)[None, :]
            x = tl.load(x_ptrs + 3 * x_stride, mask=used & (num_tokens > 3), other=0.0)
            sums3 += w * x.to(tl.float32)[None, :]
        weight = coming
    _store_row(sums0, 0, bias_ptr, out_ptr, rows, num_rows, num_tokens, HAS_BIAS)
    if TOKENS > 1:
        _store_row(sums1, 1, bias_ptr, out_ptr, rows, num_rows, num_tokens, HAS_BIAS)
    if TOKENS > 2:
        _store_row(sums2, 2, bias_ptr, out_ptr, rows, num_rows, num_tokens, HAS_BIAS)
        _store_row(sums3, 3, bias_ptr, out_ptr, rows, num_rows, num_tokens, HAS_BIAS)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias, summed in float32."""
    num_tokens = len(x)
    if num_tokens > MAX_TOKENS or num_tokens == 0:
        return functional.linear(x, weight, bias)
    num_rows, num_columns = weight.shape
    tile = _tile(num_rows, num_columns)
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    pdl = overlaps(x.device)
    _stream_kernel[(triton.cdiv(num_rows, tile.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        num_rows,
        num_columns,
        num_tokens,
        HAS_BIAS=bias is not None,
        TOKENS=next_power_of_2(num_tokens),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        PDL=pdl,
        num_warps=tile.num_warps,
        launch_pdl=pdl,
    )
    return out
