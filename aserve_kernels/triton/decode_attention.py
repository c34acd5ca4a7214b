"""Attention of the sequences of a step that have one query token: decodes.

The keys of a sequence are split over programs (Flash-Decoding, Dao et al. 2023), and a second kernel joins the parts.
The grid follows from the numbers of sequences, heads and multiprocessors alone; each program works out its share on the
device, and one without a share ends at once. The number of splits is an argument and no constant, so there is one
compilation per model, whatever the lengths and the number of sequences.
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

from aserve_kernels.triton.attention_tile import Batch, Tiles, attend
from aserve_kernels.triton.dependent_launch import let_next_start, overlaps, wait_for_previous
from aserve_kernels.triton.sizes import next_power_of_2

_MAX_SPLITS = 32
_WAVES = 4  # programs per multiprocessor to aim for


@triton.jit
def _first_and_span(seq_len, window, splits, TILE: tl.constexpr):
    """Return the first position of split 0 and how many positions a split has, both multiples of TILE."""
    first = tl.maximum(seq_len - window, 0) // TILE * TILE
    return first, tl.cdiv(tl.cdiv(seq_len - first, TILE), splits) * TILE


# What changes from step to step must not lead to another compilation.
@triton.jit(do_not_specialize=["window", "splits", "table_stride"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    acc_ptr,
    maximum_ptr,
    total_ptr,
    out_ptr,
    tables_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    window,
    splits,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    position_stride,
    log2_scale,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAP: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,
    DIRECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of the keys of one sequence with one query token, for one KV head.

    Writes acc [S, Hq, splits, D], maximum and total [S, Hq, splits], float32; nothing where the split has no keys.
    DIRECT: there is one split, whose result is the output.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(cu_seqlens_ptr + sequence)
    if tl.load(cu_seqlens_ptr + sequence + 1) - start != 1:
        return
    seq_len = tl.load(seq_lens_ptr + sequence)
    first, span = _first_and_span(seq_len, window, splits, TILE)
    low = first + split * span
    if (low >= seq_len) & (not DIRECT):  # the only split of a sequence of no length has its zeros to write
        return
    high = tl.minimum(low + span, seq_len)

    rows = tl.arange(0, BLOCK_M)
    channels = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    used = (rows < GROUP)[:, None] & (channels < D)[None, :]
    q_row = q_ptr + start.to(tl.int64) * q_stride
    q = tl.load(q_row + (heads * D)[:, None] + channels[None, :], mask=used, other=0.0)
    acc, maximum, total = attend(
        q,
        tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1),
        k_ptr + kv_head * D,
        v_ptr + kv_head * D,
        tables_ptr + sequence.to(tl.int64) * table_stride,
        low,
        high,
        window,
        block_stride,
        position_stride,
        log2_scale,
        D,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_D,
        CAP,
        TILE,
        WIDEN,
        False,
    )
    if DIRECT:
        out_row = out_ptr + start.to(tl.int64) * out_stride
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_row + (heads * D)[:, None] + channels[None, :], result.to(out_ptr.dtype.element_ty), mask=used)
    else:
        num_heads = tl.num_programs(1) * GROUP
        parts = (sequence.to(tl.int64) * num_heads + heads) * splits + split
        tl.store(acc_ptr + (parts * D)[:, None] + channels[None, :], acc, mask=used)
        tl.store(maximum_ptr + parts, maximum, mask=rows < GROUP)
        tl.store(total_ptr + parts, total, mask=rows < GROUP)


@triton.jit(do_not_specialize=["window", "splits"])
def _join_kernel(
    acc_ptr,
    maximum_ptr,
    total_ptr,
    out_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    window,
    splits,
    out_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the splits of one sequence and query head that have keys."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + sequence)
    if tl.load(cu_seqlens_ptr + sequence + 1) - start != 1:
        return
    seq_len = tl.load(seq_lens_ptr + sequence)
    first, span = _first_and_span(seq_len, window, splits, TILE)
    channels = tl.arange(0, BLOCK_D)
    numbers = tl.arange(0, MAX_SPLITS)
    written = (numbers < splits) & (first + numbers * span < seq_len)
    parts = (sequence.to(tl.int64) * tl.num_programs(1) + head) * splits + numbers
    maximum = tl.load(maximum_ptr + parts, mask=written, other=float("-inf"))
    highest = tl.max(maximum, axis=0)
    weights = tl.exp2(maximum - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(tl.load(total_ptr + parts, mask=written, other=0.0) * weights, axis=0)
    used = written[:, None] & (channels < D)[None, :]
    acc = tl.load(acc_ptr + (parts * D)[:, None] + channels[None, :], mask=used, other=0.0)
    result = tl.sum(acc * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    out_row = out_ptr + start.to(tl.int64) * out_stride + head * D
    tl.store(out_row + channels, result.to(out_ptr.dtype.element_ty), mask=channels < D)


def _decode_tiles(group: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    rows = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        return Tiles(rows, 16 if head_dim > 128 else 32, num_warps=8, num_stages=2)
    # 3.8 to 4.3 TB/s for 32 sequences of 4k to 32k (H200); with four warps 2 % less, with two waves 10 to 20 % less
    return Tiles(rows, 32 if head_dim > 128 else 64, num_warps=2, num_stages=3)


def _num_splits(num_programs: int, device: torch.device) -> int:
    """Return into how many parts the keys are split: what fills the device, never by the lengths."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    return max(1, min(_WAVES * multiprocessors // num_programs, _MAX_SPLITS))


class _Parts(NamedTuple):
    """What the splits of each sequence and query head have summed: [S, Hq, splits, D] and twice [S, Hq, splits]."""

    acc: Tensor
    maximum: Tensor
    total: Tensor

    @classmethod
    def empty(cls, num_seqs: int, num_heads: int, splits: int, head_dim: int, device: torch.device) -> _Parts:
        acc = torch.empty((num_seqs, num_heads, splits, head_dim), dtype=torch.float32, device=device)
        # Two tensors: halves of one would be aligned for some numbers of sequences only; alignment is compiled in.
        maximum = torch.empty((num_seqs, num_heads, splits), dtype=torch.float32, device=device)
        return cls(acc, maximum, torch.empty_like(maximum))


def attend_decodes(batch: Batch) -> None:
    """Write the outputs of every sequence with one query token."""
    q, out, num_seqs = batch.q, batch.out, len(batch.seq_lens)
    num_kv_heads = batch.k_cache.shape[2]
    _, num_heads, head_dim = q.shape
    tiles = _decode_tiles(batch.group, head_dim, q.dtype)
    splits = _num_splits(num_seqs * num_kv_heads, q.device)
    direct = splits == 1
    parts = _Parts(out, out, out) if direct else _Parts.empty(num_seqs, num_heads, splits, head_dim, q.device)
    pdl = overlaps(q.device)
    _decode_kernel[(num_seqs, num_kv_heads, splits)](
        q,
        batch.k_cache,
        batch.v_cache,
        *parts,
        out,
        batch.block_tables,
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.window,
        splits,
        q.stride(0),
        out.stride(0),
        *batch.strides(),
        **batch.constants(),
        BLOCK_M=tiles.block_m,
        TILE=tiles.tile,
        DIRECT=direct,
        PDL=pdl,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=pdl,
    )
    if not direct:
        _join(batch, parts, splits, tiles.tile)


def _join(batch: Batch, parts: _Parts, splits: int, tile: int) -> None:
    num_seqs, num_heads, _, head_dim = parts.acc.shape
    pdl = overlaps(batch.q.device)
    _join_kernel[(num_seqs, num_heads)](
        *parts,
        batch.out,
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.window,
        splits,
        batch.out.stride(0),
        D=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        TILE=tile,
        MAX_SPLITS=_MAX_SPLITS,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
