"""Residual addition and RMS normalisation in Triton; the contract is ``kernel_set.FusedAddRmsNorm``."""

# Triton functions have no types that Python tools know: their parameters are pointers, scalars and constants.
# ruff: noqa: ANN001, ANN202, PLR0917
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.triton.dependent_launch import let_next_start, overlaps, wait_for_previous
from aserve_kernels.triton.sizes import next_power_of_2, warps_for


@triton.jit
def _fused_add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_stride,
    residual_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x_ptrs = x_ptr + row * x_stride + columns
    residual_ptrs = residual_ptr + row * residual_stride + columns
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptrs, mask=inside, other=0.0)
    residual = tl.load(residual_ptrs, mask=inside, other=0.0)
    # The sum is rounded before it is used: later layers see the stored value.
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(residual_ptrs, total, mask=inside)
    total32 = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total32 * total32, axis=0) / size + eps)
    normed = (total32 * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(x_ptrs, normed.to(x.dtype), mask=inside)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual); the norm replaces x, the sum replaces residual."""
    size = x.shape[-1]
    block = next_power_of_2(size)
    pdl = overlaps(x.device)
    _fused_add_rms_norm_kernel[(len(x),)](
        x,
        residual,
        weight,
        x.stride(0),
        residual.stride(0),
        size,
        eps,
        BLOCK=block,
        PDL=pdl,
        num_warps=warps_for(block),
        launch_pdl=pdl,
    )
    return x, residual
