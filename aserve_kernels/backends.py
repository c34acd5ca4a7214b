"""The table of backends: a name, and the module that exports its ``KERNELS``.

A backend is imported only when it is asked for, so that the CPU path never needs Triton. Called once per engine, by
whoever composes it; layers are handed the set and never choose.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Final

from aserve_kernels.kernel_set import KernelSet

BACKENDS: Final = MappingProxyType(
    {
        "reference": "aserve_kernels.reference",
        "cpu": "aserve_kernels.cpu",
        "triton": "aserve_kernels.triton",
    }
)


def load(backend: str) -> KernelSet:
    """Return the kernel set ``reference``, ``cpu`` or ``triton``. Raises ValueError for another name."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown kernel backend {backend!r}; known: {', '.join(BACKENDS)}")
    kernel_set: KernelSet = import_module(BACKENDS[backend]).KERNELS
    return kernel_set
