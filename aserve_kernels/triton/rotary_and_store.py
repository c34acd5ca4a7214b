"""Everything between the projection and the attention in one Triton kernel; ``kernel_set.RotaryAndStore``.

Queries and keys are normalised (where the model does), rotated, and keys and values written to the cache, with each
number read and written once. One program per token and few heads: with a program per token a decode step waits for one
multiprocessor to go through all heads.
"""

# Triton functions have no types that Python tools know: their parameters are pointers, scalars and constants.
# ruff: noqa: ANN001, ANN202, PLR0917
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.triton.dependent_launch import let_next_start, overlaps, wait_for_previous
from aserve_kernels.triton.sizes import next_power_of_2

_HEADS = 4  # of one program


@triton.jit
def _scaled(x, scale, weight_ptr, channels, inside):
    """Return x [HEADS, C] normalised, with the two roundings of ``rms_norm``."""
    weight = tl.load(weight_ptr + channels, mask=inside, other=0.0)
    normed = (x.to(tl.float32) * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    return normed.to(x.dtype)


@triton.jit
def _turn(
    x_ptr, out_ptr, weight_ptr, cos_sin_ptr, heads, num_heads, eps,
    NORM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate heads of a token from x_ptr to out_ptr, which point at its first head."""
    channels = tl.arange(0, HALF_BLOCK)
    inside = channels < HALF
    places = (heads * D)[:, None] + channels[None, :]
    used = (heads < num_heads)[:, None] & inside[None, :]
    x1 = tl.load(x_ptr + places, mask=used, other=0.0)
    x2 = tl.load(x_ptr + places + HALF, mask=used, other=0.0)
    rest_channels = 2 * HALF + tl.arange(0, REST_BLOCK)
    rest_places = (heads * D)[:, None] + rest_channels[None, :]
    rest_inside = rest_channels < D
    rest_used = (heads < num_heads)[:, None] & rest_inside[None, :]
    rest = x1
    if D > 2 * HALF:
        rest = tl.load(x_ptr + rest_places, mask=rest_used, other=0.0)
    if NORM:
        a, b = x1.to(tl.float32), x2.to(tl.float32)
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if D > 2 * HALF:
            c = rest.to(tl.float32)
            squares += tl.sum(c * c, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        x1 = _scaled(x1, scale, weight_ptr, channels, inside)
        x2 = _scaled(x2, scale, weight_ptr + HALF, channels, inside)
        if D > 2 * HALF:
            rest = _scaled(rest, scale, weight_ptr, rest_channels, rest_inside)
    cos = tl.load(cos_sin_ptr + channels, mask=inside, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + HALF + channels, mask=inside, other=0.0)[None, :]
    first, second = x1.to(tl.float32), x2.to(tl.float32)
    tl.store(out_ptr + places, (first * cos - second * sin).to(x1.dtype), mask=used)
    tl.store(out_ptr + places + HALF, (second * cos + first * sin).to(x1.dtype), mask=used)
    if D > 2 * HALF:
        tl.store(out_ptr + rest_places, rest, mask=rest_used)


@triton.jit
def _rotary_and_store_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, cos_sin_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, q_weight_ptr, k_weight_ptr,
    q_stride, k_stride, v_stride, table_stride, num_q_heads, num_kv_heads, eps,
    NORM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few heads of one token: of its queries, of its keys or of its values, in this order of programs."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    q_shares = tl.cdiv(num_q_heads, HEADS)
    kv_shares = tl.cdiv(num_kv_heads, HEADS)
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * table_stride
    if share < q_shares:
        heads = share * HEADS + tl.arange(0, HEADS)
        row = q_ptr + token * q_stride
        _turn(row, row, q_weight_ptr, angles, heads, num_q_heads, eps, NORM, D, HALF, HALF_BLOCK, REST_BLOCK)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            kv_row = slot * num_kv_heads * D
            if share < q_shares + kv_shares:
                heads = (share - q_shares) * HEADS + tl.arange(0, HEADS)
                row = k_ptr + token * k_stride
                out = k_cache_ptr + kv_row
                _turn(row, out, k_weight_ptr, angles, heads, num_kv_heads, eps, NORM, D, HALF, HALF_BLOCK, REST_BLOCK)
            else:
                heads = (share - q_shares - kv_shares) * HEADS + tl.arange(0, HEADS)
                channels = tl.arange(0, BLOCK_D)
                places = (heads * D)[:, None] + channels[None, :]
                used = (heads < num_kv_heads)[:, None] & (channels < D)[None, :]
                v = tl.load(v_ptr + token * v_stride + places, mask=used, other=0.0)
                tl.store(v_cache_ptr + kv_row + places, v, mask=used)


def rotary_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate q in place; write k, rotated, and v to the cache rows of their tokens."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    half = cos_sin.shape[-1] // 2
    pdl = overlaps(q.device)
    shares = triton.cdiv(num_q_heads, _HEADS) + 2 * triton.cdiv(num_kv_heads, _HEADS)
    _rotary_and_store_kernel[(num_tokens, shares)](
        q,
        k,
        v,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        cos_sin.stride(0),
        num_q_heads,
        num_kv_heads,
        eps,
        NORM=q_weight is not None,
        D=head_dim,
        HALF=half,
        HALF_BLOCK=next_power_of_2(half),
        REST_BLOCK=next_power_of_2(max(1, head_dim - 2 * half)),
        BLOCK_D=next_power_of_2(head_dim),
        HEADS=_HEADS,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
