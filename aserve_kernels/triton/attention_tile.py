"""The loop that prefill and decode attention share: rows of queries over tiles of paged keys, with online softmax.

The query heads that share a KV head are packed with the query tokens into the rows, so that a key is read once for all
of them. Online softmax after Milakov and Gimelshein (2018) and Dao et al. (2022).
"""

# Triton functions have no types that Python tools know: their parameters are pointers, scalars and constants.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.triton.sizes import next_power_of_2


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of ``paged_attention`` that both kernels take; ``window`` is huge where there is none."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    scale: float
    window: int
    softcap: float | None
    out: Tensor

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k_cache.shape[2]

    def strides(self) -> tuple[int, int, int, float]:
        """Return the strides of table rows, blocks and positions, and the factor of scores in base 2."""
        k_cache = self.k_cache
        return self.block_tables.stride(0), k_cache.stride(0), k_cache.stride(1), self.scale * math.log2(math.e)

    def constants(self) -> dict[str, Any]:
        """Return the compile-time sizes."""
        head_dim = self.q.shape[2]
        return {
            "D": head_dim,
            "GROUP": self.group,
            "BLOCK_SIZE": self.k_cache.shape[1],
            "BLOCK_D": max(16, next_power_of_2(head_dim)),
            "CAP": 0.0 if self.softcap is None else self.softcap * math.log2(math.e),
            # Triton's interpreter, which is what runs on the CPU, has no bfloat16 products.
            "WIDEN": self.q.device.type == "cpu",
        }


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of a program: rows, keys per loop round, and how many warps and pipeline stages it gets."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


@triton.jit
def _attend_tile(
    q,
    query_positions,
    k_ptr,
    v_ptr,
    table_ptr,
    first,
    high,
    window,
    behind,
    block_stride,
    position_stride,
    log2_scale,
    acc,
    maximum,
    total,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAP: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Take in keys [first, first + TILE); without MASKED every row sees all of them."""
    channels = tl.arange(0, BLOCK_D)
    positions = first + tl.arange(0, TILE)
    inside = (positions < high) & (positions > behind)
    if BLOCK_SIZE % TILE == 0:  # the tile lies in one block: one address, and offsets that are the same in every round
        block = tl.load(table_ptr + first // BLOCK_SIZE).to(tl.int64)
        start = block * block_stride + (first % BLOCK_SIZE) * position_stride
        places = (tl.arange(0, TILE) * position_stride)[:, None] + channels[None, :]
        k_ptrs = k_ptr + start + places
        v_ptrs = v_ptr + start + places
    else:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        rows = blocks * block_stride + (positions % BLOCK_SIZE) * position_stride
        k_ptrs = k_ptr + rows[:, None] + channels[None, :]
        v_ptrs = v_ptr + rows[:, None] + channels[None, :]
    if MASKED:
        loaded = inside[:, None] & (channels < D)[None, :]
        k = tl.load(k_ptrs, mask=loaded, other=0.0)
        v = tl.load(v_ptrs, mask=loaded, other=0.0)
    elif D == BLOCK_D:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    else:
        k = tl.load(k_ptrs, mask=(channels < D)[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=(channels < D)[None, :], other=0.0)
    if WIDEN:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale
    if CAP > 0:  # tanh(x) = 2 sigmoid(2 x) - 1
        scores = CAP * (2.0 * tl.sigmoid(scores * (2.0 / CAP)) - 1.0)
    if MASKED:
        distance = query_positions[:, None] - positions[None, :]
        scores = tl.where((distance >= 0) & (distance < window), scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    base = new_maximum
    if MASKED:  # a row that has seen nothing yet must not compute -inf - -inf
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(maximum - base)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_maximum, total


@triton.jit
def attend(
    q,
    query_positions,
    k_ptr,
    v_ptr,
    table_ptr,
    low,
    high,
    window,
    block_stride,
    position_stride,
    log2_scale,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAP: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Return (acc [BLOCK_M, BLOCK_D], maximum [BLOCK_M], sum [BLOCK_M]) of rows q over keys [low, high).

    The softmax is in base 2 and not yet divided by its sum. k_ptr and v_ptr point at the KV head; CAP is that of
    scores in base 2, 0 for none. What lies behind the window of the first row is not loaded, whatever low is.
    With WHOLE, tiles that all rows see as a whole, which are most of a long prompt's, have a loop without masks.
    """
    if WIDEN:
        q = q.to(tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    behind = tl.min(query_positions, axis=0) - window
    whole_low = tl.maximum(high, low)
    whole_high = whole_low
    if WHOLE:
        unseen = tl.maximum(tl.max(query_positions, axis=0) - window + 1 - low, 0)
        whole_low = tl.minimum(low + tl.cdiv(unseen, TILE) * TILE, tl.maximum(high, low))
        seen = tl.minimum(tl.min(query_positions, axis=0) + 1, high) - low
        whole_high = tl.maximum(low + seen // TILE * TILE, whole_low)
    for first in range(low, whole_low, TILE):
        acc, maximum, total = _attend_tile(
            q, query_positions, k_ptr, v_ptr, table_ptr, first, high, window, behind, block_stride, position_stride,
            log2_scale, acc, maximum, total, True, D, BLOCK_SIZE, BLOCK_D, CAP, TILE, WIDEN,
        )  # fmt: skip
    if WHOLE:
        for first in range(whole_low, whole_high, TILE):
            acc, maximum, total = _attend_tile(
                q, query_positions, k_ptr, v_ptr, table_ptr, first, high, window, behind, block_stride, position_stride,
                log2_scale, acc, maximum, total, False, D, BLOCK_SIZE, BLOCK_D, CAP, TILE, WIDEN,
            )  # fmt: skip
        for first in range(whole_high, high, TILE):
            acc, maximum, total = _attend_tile(
                q, query_positions, k_ptr, v_ptr, table_ptr, first, high, window, behind, block_stride, position_stride,
                log2_scale, acc, maximum, total, True, D, BLOCK_SIZE, BLOCK_D, CAP, TILE, WIDEN,
            )  # fmt: skip
    return acc, maximum, total
