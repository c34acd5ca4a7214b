"""Writing to the paged cache in Triton; the contract is ``kernel_set.StoreKv``. One program per token."""

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
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_stride,
    v_stride,
    size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    channels = tl.arange(0, BLOCK)
    stored = (channels < size) & (slot >= 0)
    k = tl.load(k_ptr + token * k_stride + channels, mask=stored)
    v = tl.load(v_ptr + token * v_stride + channels, mask=stored)
    tl.store(k_cache_ptr + slot * size + channels, k, mask=stored)
    tl.store(v_cache_ptr + slot * size + channels, v, mask=stored)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy token t to cache row ``slot_mapping[t]``, unless that is negative."""
    size = k.shape[1] * k.shape[2]
    block = next_power_of_2(size)
    pdl = overlaps(k.device)
    _store_kv_kernel[(len(k),)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        size,
        BLOCK=block,
        PDL=pdl,
        num_warps=warps_for(block),
        launch_pdl=pdl,
    )
