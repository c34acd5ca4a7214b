"""Every operation in torch, arranged for speed on a CPU."""

from __future__ import annotations

from aserve_kernels.cpu.fused_add_rms_norm import fused_add_rms_norm
from aserve_kernels.cpu.paged_attention import paged_attention
from aserve_kernels.cpu.rms_norm import rms_norm
from aserve_kernels.cpu.rotary import rotary
from aserve_kernels.cpu.sample import sample
from aserve_kernels.cpu.silu_and_mul import silu_and_mul
from aserve_kernels.cpu.store_kv import store_kv
from aserve_kernels.kernel_set import KernelSet

__all__ = ["KERNELS"]

KERNELS = KernelSet(
    name="cpu",
    rms_norm=rms_norm,
    fused_add_rms_norm=fused_add_rms_norm,
    rotary=rotary,
    silu_and_mul=silu_and_mul,
    store_kv=store_kv,
    paged_attention=paged_attention,
    sample=sample,
)
