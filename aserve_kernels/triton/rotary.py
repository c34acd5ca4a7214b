"""Rotary position embedding in Triton; the contract is ``kernel_set.Rotary``. One program per token, for q and k."""

# Triton functions have no types that Python tools know: their parameters are pointers, scalars and constants.
# ruff: noqa: ANN001, ANN202, PLR0917
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.triton.dependent_launch import let_next_start, overlaps, wait_for_previous
from aserve_kernels.triton.sizes import next_power_of_2


@triton.jit
def _rotate_heads(
    x_ptr, cos, sin, num_heads, head_dim, half, HEADS: tl.constexpr, HALF: tl.constexpr
):  # x_ptr: the first head of a token; cos and sin [1, HALF]
    channels = tl.arange(0, HALF)[None, :]
    for first_head in range(0, num_heads, HEADS):
        heads = first_head + tl.arange(0, HEADS)[:, None]
        inside = (heads < num_heads) & (channels < half)
        ptrs = x_ptr + heads * head_dim + channels
        x1 = tl.load(ptrs, mask=inside, other=0.0)
        x2 = tl.load(ptrs + half, mask=inside, other=0.0)
        first, second = x1.to(tl.float32), x2.to(tl.float32)
        tl.store(ptrs, (first * cos - second * sin).to(x1.dtype), mask=inside)
        tl.store(ptrs + half, (second * cos + first * sin).to(x1.dtype), mask=inside)


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_stride,
    k_stride,
    table_stride,
    num_q_heads,
    num_k_heads,
    head_dim,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    channels = tl.arange(0, HALF)[None, :]
    table_ptrs = cos_sin_ptr + position * table_stride + channels
    cos = tl.load(table_ptrs, mask=channels < half, other=0.0)
    sin = tl.load(table_ptrs + half, mask=channels < half, other=0.0)
    _rotate_heads(q_ptr + token * q_stride, cos, sin, num_q_heads, head_dim, half, HEADS, HALF)
    _rotate_heads(k_ptr + token * k_stride, cos, sin, num_k_heads, head_dim, half, HEADS, HALF)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate channel pairs (i, i + R / 2) of each head by the angle of its position."""
    half = cos_sin.shape[-1] // 2
    pdl = overlaps(q.device)
    _rotary_kernel[(len(q),)](
        q,
        k,
        positions,
        cos_sin,
        q.stride(0),
        k.stride(0),
        cos_sin.stride(0),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        half,
        HEADS=min(8, next_power_of_2(q.shape[1])),
        HALF=next_power_of_2(half),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
