"""Matrix products by groups of rows, in plain torch; the contract is ``kernel_set.GroupedLinear``."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return each group's rows times its own matrix."""
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
    rows = torch.arange(x.shape[0], device=x.device)
    for group, end in enumerate(ends):
        start = 0 if group == 0 else ends[group - 1]
        mine = (rows >= start) & (rows < end)
        out += (x.float() @ weight[group].float().T).to(x.dtype) * mine[:, None]
    return out
