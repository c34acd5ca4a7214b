"""Weights as plain matrices in the dtype of the activations.

On a CPU, bfloat16 matrices are brought once into oneDNN's blocked layout. Measured with all linears of SmolLM2-135M on
2 cores (torch 2.13, AMX; milliseconds for M tokens, packed for no batch in particular against ``F.linear``):
M=1 14.5 / 22.0, M=8 14.8 / 21.5, M=32 17.5 / 25.3, M=128 28.2 / 39.8, M=512 80.3 / 75.0; on an AVX512_BF16 machine
packed is ahead at every M.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aserve.quantization.method import LinearMethod, MatrixSlice
from aserve_kernels.kernel_set import KernelSet, Linear

PACK_FOR_ROWS = 128
"""Rows oneDNN is told to pack a matrix for.

Packed for no number in particular, all linears of SmolLM2-135M take 33 ms at 8 rows and 42 at 32; packed for 128 rows
they take 28 and 28, and no longer at 512 (two cores with AVX512 and AMX).
"""


class UnquantizedScheme:
    """Every linear layer holds a plain matrix."""

    def method_for(self, layer_name: str, kernels: KernelSet) -> LinearMethod:
        return UnquantizedMethod(kernels.linear)


class UnquantizedMethod:
    """One plain [rows, columns] matrix, stored by checkpoints as ``weight``."""

    __slots__ = ("_multiply", "_packed", "_weight")

    def __init__(self, multiply: Linear) -> None:
        self._multiply = multiply
        self._weight: Tensor | None = None
        self._packed: Tensor | None = None

    @property
    def group_size(self) -> int:
        return 1

    def create_weights(self, num_rows: int, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = torch.empty(num_rows, num_columns, dtype=dtype, device=device)

    def tensor_shapes(self, num_rows: int, num_columns: int) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (num_rows, num_columns)}

    def load(self, name: str, part: MatrixSlice, tensor: Tensor) -> None:
        assert name == "weight"
        assert self._weight is not None
        start, stop = part.rows
        self._weight[part.offset : part.offset + stop - start].copy_(tensor[start:stop, slice(*part.columns)])

    def adopt(self, weight: Tensor) -> None:
        self._weight = weight

    def finish_loading(self) -> None:
        """Pack the matrix where that is faster; the plain one is freed (unless another layer holds it)."""
        assert self._weight is not None
        if can_pack(self._weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, PACK_FOR_ROWS)
            self._weight = None

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        assert self._weight is not None
        return self._multiply(x, self._weight, bias)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies this matrix natively: bfloat16, on a CPU with the instructions for it."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
