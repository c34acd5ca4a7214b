"""Matrices in oneDNN's blocked layout; the contract is ``kernel_set.PackMatrix``.

Measured with all linears of SmolLM2-135M on 2 cores (torch 2.13, AMX; milliseconds for M tokens, packed for no batch in
particular against ``F.linear``): M=1 14.5 / 22.0, M=8 14.8 / 21.5, M=32 17.5 / 25.3, M=128 28.2 / 39.8, M=512 80.3 /
75.0; on an AVX512_BF16 machine packed is ahead at every M.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve_kernels.kernel_set import PackedMatrix

_PACK_FOR_ROWS = 128
"""Rows oneDNN is told to pack a matrix for.

Packed for no number in particular, all linears of SmolLM2-135M take 33 ms at 8 rows and 42 at 32; packed for 128 rows
they take 28 and 28, and no longer at 512 (two cores with AVX512 and AMX).
"""


def pack(weight: Tensor) -> PackedMatrix | None:
    """Return the product with ``weight``, packed where oneDNN multiplies its dtype natively."""
    if not can_pack(weight):
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    return multiply


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies this matrix natively: bfloat16, on a CPU with the instructions for it."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
