"""The gated activation of Gemma in plain torch; the contract is ``kernel_set.GeluTanhAndMul``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu_tanh_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return gelu(first half) * second half, with the tanh form of gelu."""
    gate, up = x.float().chunk(2, dim=-1)
    result = (F.gelu(gate, approximate="tanh") * up).to(x.dtype)
    return result if out is None else out.copy_(result)
