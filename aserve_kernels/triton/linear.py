"""Matrix products for few tokens, where the matrix has only to be read; cuBLAS beyond. ``kernel_set.Linear``.

One token is multiplied lane by lane while the matrix streams by; up to 64 go through tensor cores, as the narrow side
of the product, with the sums over columns split so that enough programs read. All linears of a decode step of a 7B
model on an H200, in one CUDA graph: 3.37 ms for one token (norms included), 3.40 for 16, 3.50 for 32 and 3.76 for 64,
where cuBLAS takes 3.91, 3.86, 3.86 and 3.82.
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

MAX_TOKENS = 64
"""Beyond this many cuBLAS is ahead."""

_REDUCED = 1024  # outputs that one program sums up over the splits
_PROGRAMS = 132  # of a Hopper GPU at a time, where each takes most of a multiprocessor's shared memory


class StreamTile(NamedTuple):
    """Rows of the matrix that a program owns, columns it reads at a time, and its warps."""

    rows: int
    columns: int
    num_warps: int


class DotTile(NamedTuple):
    """Likewise, with the number of programs that share the columns, and of tiles on their way."""

    rows: int
    columns: int
    splits: int
    num_stages: int


def stream_tile(num_rows: int, num_columns: int) -> StreamTile:
    """Return what was fastest for the matrices of a 7B model (H200, TB/s): qkv 3.77, output 3.43, gate and up 4.37,
    down 4.27, head 4.58. Long rows want fewer programs with more in flight each.
    """
    if num_rows >= 16384:
        return StreamTile(4, 512, 2)
    if num_columns >= 8192:
        return StreamTile(4, 1024, 4)
    return StreamTile(8, 512, 8) if num_rows <= 4096 else StreamTile(4, 512, 4)


def dot_tile(num_rows: int) -> DotTile:
    """Return what was fastest for 16 and 32 tokens (H200, TB/s): qkv 2.84, output 2.90, gate and up 4.11, down 3.86.

    Many rows fill the GPU by themselves; of fewer, two programs share the columns, if all of them then run at once.
    """
    if num_rows >= 16384:
        return DotTile(64, 128, 1, 3)
    return DotTile(64, 128, 2, 6) if num_rows <= 32 * _PROGRAMS else DotTile(128, 64, 2, 6)


@triton.jit
def _stream_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of one token; the next columns of the matrix are on their way while these are multiplied."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    there = (rows < num_rows)[:, None]
    weight_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    let_next_start(PDL)
    inside = there & (columns < num_columns)[None, :]
    weight = tl.load(weight_ptrs, mask=inside, other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, num_columns, COLUMNS):
        later = first + COLUMNS + columns
        inside = there & (later < num_columns)[None, :]
        coming = tl.load(weight_ptrs + (first + COLUMNS), mask=inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + first + columns, mask=first + columns < num_columns, other=0.0)
        sums += weight.to(tl.float32) * x.to(tl.float32)[None, :]
        weight = coming
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(bias_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, result.to(out_ptr.dtype.element_ty), mask=rows < num_rows)


@triton.jit
def _dot_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    num_columns,
    x_stride,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of up to TOKENS tokens over one share of the columns; out [SPLITS, num_tokens, num_rows].

    EVEN: rows and columns are multiples of the tile. The bias is added here if there is one share only.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    tokens = tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)
    span = tl.cdiv(tl.cdiv(num_columns, COLUMNS), SPLITS) * COLUMNS
    low = split * span
    high = tl.minimum(low + span, num_columns)
    let_next_start(PDL)
    wait_for_previous(PDL)
    weight_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    x_ptrs = x_ptr + (tokens * x_stride)[None, :] + columns[:, None]
    there = (tokens < num_tokens)[None, :]
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(low, high, COLUMNS):
        if EVEN:
            weight = tl.load(weight_ptrs + first, eviction_policy="evict_first")
            x = tl.load(x_ptrs + first, mask=there, other=0.0)
        else:
            used = first + columns < num_columns
            weight = tl.load(weight_ptrs + first, mask=(rows < num_rows)[:, None] & used[None, :], other=0.0)
            x = tl.load(x_ptrs + first, mask=there & used[:, None], other=0.0)
        if WIDEN:
            weight = weight.to(tl.float32)
            x = x.to(tl.float32)
        sums = tl.dot(weight, x, sums, input_precision="ieee")
    if HAS_BIAS and SPLITS == 1:
        sums += tl.load(bias_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + (split * num_tokens + tokens)[None, :] * num_rows + rows[:, None]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=there & (rows < num_rows)[:, None])


@triton.jit
def _reduce_kernel(
    parts_ptr, bias_ptr, out_ptr, size, num_rows, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add up parts [SPLITS, size] and the bias, whose length is num_rows."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    let_next_start(PDL)
    wait_for_previous(PDL)
    result = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        result += tl.load(parts_ptr + split * size + places, mask=inside, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias_ptr + places % num_rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=inside)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias, summed in float32."""
    num_tokens = len(x)
    if num_tokens == 1:
        return _stream(x, weight, bias)
    # float32 has no tensor cores that sum exactly enough
    if num_tokens == 0 or num_tokens > MAX_TOKENS or (x.dtype == torch.float32 and x.is_cuda):
        return functional.linear(x, weight, bias)
    return _dot(x, weight, bias)


def _stream(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows, num_columns = weight.shape
    tile = stream_tile(num_rows, num_columns)
    out = torch.empty((1, num_rows), dtype=x.dtype, device=x.device)
    pdl = overlaps(x.device)
    _stream_kernel[(triton.cdiv(num_rows, tile.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        num_columns,
        HAS_BIAS=bias is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        PDL=pdl,
        num_warps=tile.num_warps,
        launch_pdl=pdl,
    )
    return out


def _dot(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_tokens, (num_rows, num_columns) = len(x), weight.shape
    tile = dot_tile(num_rows)
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    parts = out
    if tile.splits > 1:
        parts = torch.empty((tile.splits, num_tokens, num_rows), dtype=torch.float32, device=x.device)
    pdl = overlaps(x.device)
    _dot_kernel[(triton.cdiv(num_rows, tile.rows), tile.splits)](
        x,
        weight,
        weight if bias is None else bias,
        parts,
        num_tokens,
        num_rows,
        num_columns,
        x.stride(0),
        HAS_BIAS=bias is not None,
        TOKENS=max(16, next_power_of_2(num_tokens)),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        SPLITS=tile.splits,
        EVEN=num_rows % tile.rows == 0 and num_columns % (tile.columns * tile.splits) == 0,
        WIDEN=not x.is_cuda,  # Triton's interpreter, which is what runs on the CPU, has no bfloat16 products
        PDL=pdl,
        num_warps=4,
        num_stages=tile.num_stages,
        launch_pdl=pdl,
    )
    if tile.splits > 1:
        _reduce_kernel[(triton.cdiv(out.numel(), _REDUCED),)](
            parts,
            weight if bias is None else bias,
            out,
            out.numel(),
            num_rows,
            HAS_BIAS=bias is not None,
            SPLITS=tile.splits,
            BLOCK=_REDUCED,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return out
