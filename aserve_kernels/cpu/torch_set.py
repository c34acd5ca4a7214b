"""Every operation in torch, arranged for speed on a CPU."""

from __future__ import annotations

from aserve_kernels.cpu import (
    fused_add_rms_norm,
    gelu_tanh_and_mul,
    grouped_linear,
    linear,
    pack,
    paged_attention,
    rms_norm,
    rotary,
    sample,
    silu_and_mul,
    store_kv,
)
from aserve_kernels.kernel_set import KernelSet

__all__ = ["KERNELS"]

KERNELS = KernelSet(
    name="cpu",
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
    pack=pack.pack,
    form="torch",
)
