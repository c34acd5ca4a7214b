"""The gated activation in plain torch; the contract is ``kernel_set.SiluAndMul``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return silu(first half) * second half."""
    gate, up = x.float().chunk(2, dim=-1)
    result = (F.silu(gate) * up).to(x.dtype)
    return result if out is None else out.copy_(result)
