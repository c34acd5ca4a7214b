"""Every operation as a Triton kernel, for NVIDIA GPUs; on CPU tensors under ``TRITON_INTERPRET=1``."""

from __future__ import annotations

from aserve_kernels.kernel_set import KernelSet
from aserve_kernels.triton import (
    fused_add_rms_norm,
    gelu_tanh_and_mul,
    grouped_linear,
    linear,
    paged_attention,
    rms_norm,
    rotary,
    rotary_and_store,
    sample,
    silu_and_mul,
    store_kv,
)

__all__ = ["KERNELS"]

KERNELS = KernelSet(
    name="triton",
    linear=linear.linear,
    grouped_linear=grouped_linear.grouped_linear,
    rms_norm=rms_norm.rms_norm,
    fused_add_rms_norm=fused_add_rms_norm.fused_add_rms_norm,
    rotary=rotary.rotary,
    fused_rotary_and_store=rotary_and_store.rotary_and_store,
    silu_and_mul=silu_and_mul.silu_and_mul,
    gelu_tanh_and_mul=gelu_tanh_and_mul.gelu_tanh_and_mul,
    store_kv=store_kv.store_kv,
    paged_attention=paged_attention.paged_attention,
    sample=sample.sample,
    can_be_captured=True,
)
