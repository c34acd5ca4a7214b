"""RMS normalisation for the CPU; the contract is ``kernel_set.RmsNorm``.

On small steps the cost is the number of torch calls, each 1 to 3 us: a single row, which is every decode step of a
lone request, takes 5 of them, others 9.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    size = x.shape[-1]
    x32 = x.float()
    if x.numel() == size:
        row = x32.reshape(size)
        mean_square = float(torch.dot(row, row)) / size
        # A tensor times a Python number is computed in float32 and rounded once to the tensor's dtype.
        normed = (x if weight.dtype == x.dtype else x32) * (mean_square + eps) ** -0.5
    else:
        scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().mul_(1 / size).add_(eps).rsqrt_()
        normed = (x32 * scale).to(weight.dtype)
    # Into another dtype, torch multiplies in the wider one and rounds once.
    return normed.mul_(weight).to(x.dtype) if out is None else torch.mul(normed, weight, out=out)
