"""Attention over the paged cache in plain torch; the contract is ``kernel_set.PagedAttention``.

One sequence at a time, with the whole score matrix in memory: right, and slow.
"""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T, causal and within the window) v, sequence by sequence."""
    result = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    bounds = cu_seqlens_q.tolist()
    for s, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(bounds[s], bounds[s + 1])
        keys = _gather(k_cache, block_tables[s], seq_len)
        values = _gather(v_cache, block_tables[s], seq_len)
        result[rows] = _attend(q[rows], keys, values, scale, window).to(q.dtype)
    return result


def _gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """Return positions [0, seq_len) of one sequence, [seq_len, Hkv, D] float32."""
    num_blocks = -(-seq_len // cache.shape[1])
    return cache[block_table[:num_blocks].long()].flatten(0, 1)[:seq_len].float()


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """Return [L, Hq, D] float32 for queries [L, Hq, D], the last L of the positions in keys."""
    query_len, num_heads, seq_len = q.shape[0], q.shape[1], keys.shape[0]
    group = num_heads // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # [seq_len, Hq, D]
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    key_positions = torch.arange(seq_len, device=q.device)
    query_positions = torch.arange(seq_len - query_len, seq_len, device=q.device).unsqueeze(1)
    visible = key_positions <= query_positions
    if window is not None:
        visible &= key_positions > query_positions - window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
