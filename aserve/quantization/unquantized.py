"""Weights as plain matrices in the dtype of the activations, or as the kernel set packs them.

What a packed matrix is and when it pays is the kernel set's to know; here it replaces the plain one once it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aserve.quantization.method import LinearMethod, MatrixSlice
from aserve_kernels.kernel_set import KernelSet, PackedMatrix


class UnquantizedScheme:
    """Every linear layer holds a plain matrix."""

    def method_for(self, layer_name: str, kernels: KernelSet) -> LinearMethod:
        return UnquantizedMethod(kernels)


class UnquantizedMethod:
    """One plain [rows, columns] matrix, stored by checkpoints as ``weight``."""

    __slots__ = ("_multiply", "_pack", "_packed", "_weight")

    def __init__(self, kernels: KernelSet) -> None:
        self._multiply = kernels.linear
        self._pack = kernels.pack
        self._weight: Tensor | None = None
        self._packed: PackedMatrix | None = None

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
        self._packed = self._pack(self._weight)
        if self._packed is not None:
            self._weight = None

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is not None:
            return self._packed(x, bias)
        assert self._weight is not None
        return self._multiply(x, self._weight, bias)
