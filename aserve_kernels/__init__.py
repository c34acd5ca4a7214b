"""GPU operations behind one typed interface, with three backends.

``reference`` is plain torch, written to be read; ``cpu`` is torch arranged for speed on a CPU; ``triton`` is for GPUs.
"""

from __future__ import annotations

from importlib import import_module

from aserve_kernels.kernel_set import KernelSet

__all__ = ["KernelSet", "load"]

_BACKENDS = {
    "reference": "aserve_kernels.reference",
    "cpu": "aserve_kernels.cpu",
    "triton": "aserve_kernels.triton",
}


def load(backend: str) -> KernelSet:
    """Return the kernel set ``reference``, ``cpu`` or ``triton``. Raises ValueError for another name."""
    if backend not in _BACKENDS:
        raise ValueError(f"unknown kernel backend {backend!r}; known: {', '.join(_BACKENDS)}")
    kernel_set: KernelSet = import_module(_BACKENDS[backend]).KERNELS
    return kernel_set
