"""The table of backends: a name, and the module that exports its ``KERNELS`` (the CPU's: ``load_kernels``).

A backend is imported only when it is asked for, so that the CPU path never needs Triton. Called once per engine, by
whoever composes it; layers are handed the set and never choose.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
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


def load(backend: str, cache_dir: Path | None = None) -> KernelSet:
    """Return the kernel set ``reference``, ``cpu`` or ``triton``. Raises ValueError for another name.

    ``cache_dir`` is where a backend may keep what it compiles; default ``~/.cache/aserve``.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown kernel backend {backend!r}; known: {', '.join(BACKENDS)}")
    module = import_module(BACKENDS[backend])
    kernel_set: KernelSet = module.load_kernels(cache_dir) if backend == "cpu" else module.KERNELS
    return kernel_set
