"""Matrix products by groups of rows, in Triton; the contract is ``kernel_set.GroupedLinear``.

The rows are cut into tiles of one group each. How many tiles a group has is only known on the device, so the grid has
as many as there can be, and those past the last do nothing: no value is looked at on the host.
"""

# Triton functions have no types that Python tools know: their parameters are pointers, scalars and constants.
# ruff: noqa: ANN001, ANN202, PLR0917
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.triton.sizes import next_power_of_2

_ROWS, _COLUMNS, _DEPTH = 16, 64, 64
_MANY_ROWS = 64


@triton.jit
def _grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    ends_ptr,
    first_tiles_ptr,
    out_ptr,
    num_groups,
    num_columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    tile_ends = tl.load(first_tiles_ptr + groups, mask=groups < num_groups, other=2**30)
    group = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)  # tile_ends[g]: tiles up to and with group g
    if group >= num_groups:
        return
    previous = tl.maximum(group - 1, 0)
    is_first = group == 0
    start = tl.where(is_first, 0, tl.load(ends_ptr + previous))
    first_tile = tl.where(is_first, 0, tl.load(first_tiles_ptr + previous))
    end = tl.load(ends_ptr + group)
    rows = (start + (tile - first_tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + rows[:, None] * depth + inner[None, :]
    weight_rows = group.to(tl.int64) * num_columns + columns
    weight_ptrs = weight_ptr + weight_rows[None, :] * depth + inner[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for offset in range(0, depth, DEPTH):
        inside = inner + offset < depth
        x = tl.load(x_ptrs + offset, mask=(rows < end)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + offset, mask=(columns < num_columns)[None, :] & inside[:, None], other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
    out_ptrs = out_ptr + rows[:, None] * num_columns + columns[None, :]
    mask = (rows < end)[:, None] & (columns < num_columns)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return each group's rows times its own matrix."""
    num_rows, depth = x.shape
    num_groups, num_columns, _ = weight.shape
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    rows_per_tile = _ROWS if num_rows <= num_groups * _ROWS else _MANY_ROWS
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    tile_ends = ((counts + rows_per_tile - 1) // rows_per_tile).cumsum(0, dtype=torch.int32)
    constants: dict[str, Any] = {
        "ROWS": rows_per_tile,
        "COLUMNS": _COLUMNS,
        "DEPTH": _DEPTH,
        "GROUPS": next_power_of_2(num_groups),
        "WIDEN": not x.is_cuda,  # Triton's interpreter, which is what runs on the CPU, has no bfloat16 products
    }
    most_tiles = triton.cdiv(num_rows, rows_per_tile) + min(num_groups, num_rows)
    _grouped_linear_kernel[most_tiles, triton.cdiv(num_columns, _COLUMNS)](
        x,
        weight,
        ends,
        tile_ends,
        out,
        num_groups,
        num_columns,
        depth,
        **constants,
    )
    return out
