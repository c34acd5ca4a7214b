"""Every operation in plain torch, for any device: what the contract means, and what other backends are held against."""

from __future__ import annotations

from aserve_kernels.kernel_set import KernelSet
from aserve_kernels.reference import (
    fused_add_rms_norm,
    gelu_tanh_and_mul,
    grouped_linear,
    linear,
    paged_attention,
    rms_norm,
    rotary,
    sample,
    silu_and_mul,
    store_kv,
)

__all__ = ["KERNELS"]

KERNELS = KernelSet(
    name="reference",
    linear=linear.linear,
    grouped_linear=grouped_linear.grouped_linear,
    rms_norm=rms_norm.rms_norm,
    fused_add_rms_norm=fused_add_rms_norm.fused_add_rms_norm,
    rotary=rotary.rotary,
    silu_and_mul=silu_and_mul.silu_and_mul,
    gelu_tanh_and_mul=gelu_tanh_and_mul.gelu_tanh_and_mul,
    store_kv=store_kv.store_kv,
    paged_attention=paged_attention.paged_attention,
    sample=sample.sample,
)
