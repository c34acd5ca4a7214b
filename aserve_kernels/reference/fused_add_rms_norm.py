"""Residual addition and RMS normalisation in plain torch; the contract is ``kernel_set.FusedAddRmsNorm``."""

from __future__ import annotations

from torch import Tensor

from aserve_kernels.reference.rms_norm import rms_norm


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total
