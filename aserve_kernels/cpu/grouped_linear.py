"""Matrix products by groups of rows, only of groups that have any; the contract is ``kernel_set.GroupedLinear``."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return each group's rows times its own matrix."""
    out = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[group].T, out=out[start:end])
        start = end
    return out
