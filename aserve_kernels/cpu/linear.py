"""A matrix product with a plain weight on the CPU; the contract is ``kernel_set.Linear``.

Weights that oneDNN multiplies faster in a layout of its own do not come here: ``aserve.quantization`` packs them.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias."""
    return functional.linear(x, weight, bias)
