"""A matrix product with a plain matrix; the contract is ``kernel_set.Linear``."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias."""
    return functional.linear(x, weight, bias)
