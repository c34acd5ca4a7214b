"""RMS normalisation in plain torch; the contract is ``kernel_set.RmsNorm``."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    result = (normed.to(weight.dtype) * weight).to(x.dtype)
    return result if out is None else out.copy_(result)
