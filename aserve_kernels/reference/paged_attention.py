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
    softcap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(capped scale * q k^T, causal and within the window) v, sequence by sequence."""
    result = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    bounds = cu_seqlens_q.tolist()
    for s, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(bounds[s], bounds[s + 1])
        first_query = seq_len - (bounds[s + 1] - bounds[s])
        start = 0 if window is None else max(0, first_query - window + 1)
        keys = _gather(k_cache, block_tables[s], start, seq_len)
        values = _gather(v_cache, block_tables[s], start, seq_len)
        result[rows] = _attend(q[rows], keys, values, scale, window, softcap).to(q.dtype)
    return result


def _gather(cache: Tensor, block_table: Tensor, start: int, end: int) -> Tensor:
    """Return positions [start, end) of one sequence, [end - start, Hkv, D] float32."""
    block_size = cache.shape[1]
    first, offset = divmod(start, block_size)
    blocks = block_table[first : -(-end // block_size)].long()
    return cache[blocks].flatten(0, 1)[offset : offset + end - start].float()


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """Return [L, Hq, D] float32 for queries [L, Hq, D], the last L of the positions in keys."""
    query_len, num_heads, num_keys = q.shape[0], q.shape[1], keys.shape[0]
    group = num_heads // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # [num_keys, Hq, D]
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key_positions = torch.arange(num_keys, device=q.device)
    query_positions = torch.arange(num_keys - query_len, num_keys, device=q.device).unsqueeze(1)
    visible = key_positions <= query_positions
    if window is not None:
        visible &= key_positions > query_positions - window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
