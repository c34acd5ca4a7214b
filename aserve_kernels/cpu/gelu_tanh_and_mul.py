"""The gated activation of Gemma for the CPU; the contract is ``kernel_set.GeluTanhAndMul``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_tanh_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return gelu(first half) * second half; both steps compute in float32 and round to x's dtype."""
    gate, up = x.chunk(2, dim=-1)
    activated = F.gelu(gate, approximate="tanh")
    return activated.mul_(up) if out is None else torch.mul(activated, up, out=out)
