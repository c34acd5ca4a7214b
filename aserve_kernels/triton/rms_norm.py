"""RMS normalisation in Triton; the contract is ``kernel_set.RmsNorm``. One program per row, the row in registers."""

# Triton functions have no types that Python tools know: their parameters are pointers, scalars and constants.
# ruff: noqa: ANN001, ANN202, PLR0917
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.triton.dependent_launch import let_next_start, overlaps, wait_for_previous
from aserve_kernels.triton.sizes import next_power_of_2, warps_for


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_token_stride,
    x_head_stride,
    out_token_stride,
    out_head_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * x_token_stride + head * x_head_stride + columns, mask=inside, other=0.0)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / size + eps)
    normed = (x32 * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + token * out_token_stride + head * out_head_stride + columns, normed.to(x.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    rows, out_rows = (y if y.dim() == 3 else y.unsqueeze(1) for y in (x, result))  # [T, heads, H]
    num_tokens, num_heads, size = rows.shape
    block = next_power_of_2(size)
    pdl = overlaps(x.device)
    _rms_norm_kernel[(num_tokens, num_heads)](
        rows,
        weight,
        out_rows,
        rows.stride(0),
        rows.stride(1),
        out_rows.stride(0),
        out_rows.stride(1),
        size,
        eps,
        BLOCK=block,
        PDL=pdl,
        num_warps=warps_for(block),
        launch_pdl=pdl,
    )
    return result
