"""The CPU's kernel set: operations in C where the machine has a compiler, else in torch, arranged for speed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from aserve_kernels.cpu import pack as torch_pack
from aserve_kernels.cpu.native.library import Library, load_library
from aserve_kernels.cpu.native.matmul import NativeMatrix, can_pack
from aserve_kernels.cpu.native.operations import Operations
from aserve_kernels.cpu.native.threads import Threads
from aserve_kernels.cpu.torch_set import KERNELS as TORCH_KERNELS
from aserve_kernels.kernel_set import KernelSet, PackedMatrix

__all__ = ["TORCH_KERNELS", "load_kernels", "native_kernels"]


def load_kernels(cache_dir: Path | None) -> KernelSet:
    """Return the set in C, whose library is kept under ``cache_dir``, or the one in torch if it cannot be compiled."""
    library = load_library(cache_dir)
    if isinstance(library, str):
        return TORCH_KERNELS.replace(form=f"torch; {library}")
    return native_kernels(library)


def native_kernels(library: Library) -> KernelSet:
    """Return the set over a compiled library; what that does not compute stays torch's."""
    threads = Threads(library)
    operations = Operations(library, threads)
    return TORCH_KERNELS.replace(
        rms_norm=operations.rms_norm,
        fused_add_rms_norm=operations.fused_add_rms_norm,
        rotary=operations.rotary,
        silu_and_mul=operations.silu_and_mul,
        gelu_tanh_and_mul=operations.gelu_tanh_and_mul,
        store_kv=operations.store_kv,
        paged_attention=operations.paged_attention,
        use_threads=threads.use,
        pack=partial(_pack, library, threads),
        form=f"native, {library.matmul}" if library.matmul else "native",
    )


def _pack(library: Library, threads: Threads, weight: Tensor) -> PackedMatrix | None:
    if can_pack(library, weight):
        return NativeMatrix(library, threads, weight)
    return torch_pack.pack(weight)
