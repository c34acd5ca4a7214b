"""Tensor operations behind one typed interface, with three backends.

``reference`` is plain torch, written to be read; ``cpu`` is torch arranged for speed on a CPU; ``triton`` is for GPUs.
"""

from __future__ import annotations

from aserve_kernels.backends import BACKENDS, load
from aserve_kernels.kernel_set import KernelSet

__all__ = ["BACKENDS", "KernelSet", "load"]
