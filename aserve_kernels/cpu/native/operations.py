"""The operations of a kernel set over the compiled library; contracts in ``kernel_set``.

Each takes what the library computes (float32 and bfloat16) and hands anything else to torch's form of the operation.
Arguments are passed as addresses and strides: a call costs 3 us in all, whatever the number of tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aserve_kernels.cpu import fused_add_rms_norm as torch_fused_add_rms_norm
from aserve_kernels.cpu import gelu_tanh_and_mul as torch_gelu_tanh_and_mul
from aserve_kernels.cpu import paged_attention as torch_paged_attention
from aserve_kernels.cpu import rms_norm as torch_rms_norm
from aserve_kernels.cpu import rotary as torch_rotary
from aserve_kernels.cpu import silu_and_mul as torch_silu_and_mul
from aserve_kernels.cpu import store_kv as torch_store_kv
from aserve_kernels.cpu.native.library import KINDS, MOST_DIM, Library
from aserve_kernels.cpu.native.threads import Threads

_SHORT = 1 << 15
"""Elements up to which an operation on rows is over in a few microseconds."""

_SILU, _GELU_TANH = 0, 1  # as in rows.c


class Operations:
    """The library's operations; the methods are those of ``KernelSet`` with the same names."""

    def __init__(self, library: Library, threads: Threads) -> None:
        self._short = library.short
        self._long = library.long
        self._threads = threads

    def _for_size(self, x: Tensor) -> Any:
        return self._short if x.numel() <= _SHORT else self._long

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
        kind, weight_kind = KINDS.get(x.dtype), KINDS.get(weight.dtype)
        if kind is None or weight_kind is None or weight_kind > kind:
            return torch_rms_norm.rms_norm(x, weight, eps, out=out)
        result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        tokens, heads, size = x.shape if x.dim() == 3 else (x.shape[0], 1, x.shape[1])
        self._for_size(x).aserve_rms_norm(
            x.data_ptr(), weight.data_ptr(), None, result.data_ptr(), tokens, heads, x.stride(0), x.stride(-2),
            result.stride(0), result.stride(-2), size, eps, kind, weight_kind, self._threads(x.dtype),
        )  # fmt: skip
        return result

    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        kind, weight_kind = KINDS.get(x.dtype), KINDS.get(weight.dtype)
        if kind is None or weight_kind is None or weight_kind > kind:
            return torch_fused_add_rms_norm.fused_add_rms_norm(x, residual, weight, eps)
        tokens, size = x.shape
        address = x.data_ptr()
        self._for_size(x).aserve_rms_norm(
            address, weight.data_ptr(), residual.data_ptr(), address, tokens, 1, size, size, size, size, size, eps,
            kind, weight_kind, self._threads(x.dtype),
        )  # fmt: skip
        return x, residual

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        kind = KINDS.get(q.dtype)
        if kind is None:
            torch_rotary.rotary(q, k, positions, cos_sin)
            return
        tokens, heads, dim = q.shape
        self._for_size(q).aserve_rotary(
            q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), tokens, q.stride(0), k.stride(0),
            heads, k.shape[1], dim, cos_sin.shape[1], kind, self._threads(q.dtype),
        )  # fmt: skip

    def silu_and_mul(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        if x.dtype not in KINDS:
            return torch_silu_and_mul.silu_and_mul(x, out=out)
        return self._gate(x, out, _SILU)

    def gelu_tanh_and_mul(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        if x.dtype not in KINDS:
            return torch_gelu_tanh_and_mul.gelu_tanh_and_mul(x, out=out)
        return self._gate(x, out, _GELU_TANH)

    def _gate(self, x: Tensor, out: Tensor | None, activation: int) -> Tensor:
        tokens, width = x.shape
        result = torch.empty((tokens, width // 2), dtype=x.dtype, device=x.device) if out is None else out
        self._for_size(x).aserve_gate(
            x.data_ptr(), result.data_ptr(), tokens, x.stride(0), result.stride(0), width // 2, KINDS[x.dtype],
            activation, self._threads(x.dtype),
        )  # fmt: skip
        return result

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        if k.dtype != k_cache.dtype:
            torch_store_kv.store_kv(k, v, k_cache, v_cache, slot_mapping)
            return
        tokens, heads, dim = k.shape
        size = k.element_size()
        self._for_size(k).aserve_store_kv(
            k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slot_mapping.data_ptr(), tokens,
            k.stride(0) * size, v.stride(0) * size, heads * dim * size,
        )  # fmt: skip

    def paged_attention(
        self,
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
        kind = KINDS.get(q.dtype)
        if kind is None or k_cache.dtype != q.dtype or q.shape[2] > MOST_DIM:
            return torch_paged_attention.paged_attention(
                q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, max_query_len=max_query_len,
                max_seq_len=max_seq_len, scale=scale, window=window, softcap=softcap, out=out,
            )  # fmt: skip
        result = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        _, block_size, kv_heads, dim = k_cache.shape
        failed = self._long.aserve_paged_attention(
            q.data_ptr(), result.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr(),
            cu_seqlens_q.data_ptr(), seq_lens.data_ptr(), seq_lens.shape[0], q.stride(0), result.stride(0),
            block_tables.stride(0), q.shape[1], kv_heads, dim, block_size, k_cache.stride(0), v_cache.stride(0),
            scale, window or 0, softcap or 0.0, kind, self._threads(q.dtype),
        )  # fmt: skip
        if failed:
            raise MemoryError("attention: no memory for the list of its tasks")
        return result
