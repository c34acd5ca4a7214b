"""Every operation in plain torch, for any device: what the contract means, and what other backends are held against."""

from __future__ import annotations

from aserve_kernels.kernel_set import KernelSet
from aserve_kernels.reference.fused_add_rms_norm import fused_add_rms_norm
from aserve_kernels.reference.paged_attention import paged_attention
from aserve_kernels.reference.rms_norm import rms_norm
from aserve_kernels.reference.rotary import rotary
from aserve_kernels.reference.sample import sample
from aserve_kernels.reference.silu_and_mul import silu_and_mul
from aserve_kernels.reference.store_kv import store_kv

__all__ = ["KERNELS"]

KERNELS = KernelSet(
    name="reference",
    rms_norm=rms_norm,
    fused_add_rms_norm=fused_add_rms_norm,
    rotary=rotary,
    silu_and_mul=silu_and_mul,
    store_kv=store_kv,
    paged_attention=paged_attention,
    sample=sample,
)
