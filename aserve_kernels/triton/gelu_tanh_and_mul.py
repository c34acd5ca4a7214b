"""The gated activation of Gemma in Triton; the contract is ``kernel_set.GeluTanhAndMul``."""

# Triton functions have no types that Python tools know: their parameters are pointers, scalars and constants.
# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.triton.dependent_launch import let_next_start, overlaps, wait_for_previous
from aserve_kernels.triton.sizes import next_power_of_2

_BLOCK = 1024


@triton.jit
def _gelu_tanh_and_mul_kernel(x_ptr, out_ptr, x_stride, out_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + size + columns, mask=inside, other=0.0)
    g = gate.to(tl.float32)
    # (1 + tanh(y)) / 2 is sigmoid(2 y); 1.5957691216 is 2 sqrt(2 / pi)
    product = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * up.to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, product.to(gate.dtype), mask=inside)


def gelu_tanh_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return gelu(first half) * second half, with the tanh form of gelu."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    result = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device) if out is None else out
    block = min(_BLOCK, next_power_of_2(size))
    pdl = overlaps(x.device)
    _gelu_tanh_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](
        x, result, x.stride(0), result.stride(0), size, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return result
