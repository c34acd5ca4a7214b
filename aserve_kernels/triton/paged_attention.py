"""Attention over the paged cache in Triton; the contract is ``kernel_set.PagedAttention``.

Sequences with one query token go to one kernel, those with more to another; both are launched for a mixed batch, and
each leaves the other's sequences alone, so that the host need not know which is which.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve_kernels.triton.attention_tile import Batch
from aserve_kernels.triton.decode_attention import attend_decodes
from aserve_kernels.triton.prefill_attention import attend_prefills

_NO_WINDOW = 2**30


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
    """Return softmax(capped scale * q k^T, causal and within the window) v."""
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    reach = _NO_WINDOW if window is None else window
    batch = Batch(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, scale, reach, softcap, result)
    if max_query_len > 1:
        attend_prefills(batch)
    if len(q) == 1 or len(seq_lens) > 1:
        attend_decodes(batch)
    return result
