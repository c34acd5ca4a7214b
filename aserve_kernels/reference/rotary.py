"""Rotary position embedding in plain torch; the contract is ``kernel_set.Rotary``."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate channel pairs (i, i + R / 2) of each head by the angle of its position."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # each [T, 1, R / 2]
    for x in (q, k):
        rotated = x[..., : cos_sin.shape[-1]]
        first, second = rotated.float().chunk(2, dim=-1)  # each [T, heads, R / 2]
        rotated.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
