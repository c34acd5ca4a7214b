"""Residual addition and RMS normalisation for the CPU; the contract is ``kernel_set.FusedAddRmsNorm``."""

from __future__ import annotations

from torch import Tensor

from aserve_kernels.cpu.rms_norm import rms_norm


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual); the sum replaces residual, the norm replaces x."""
    residual.add_(x)
    return rms_norm(residual, weight, eps, out=x), residual
