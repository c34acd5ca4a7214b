"""Matrix products with a matrix that was packed once, over the compiled library; the contract is
``kernel_set.PackMatrix``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from aserve_kernels.cpu.native.library import Library
from aserve_kernels.cpu.native.threads import Threads

_COLUMNS = 32  # that the library takes together


_MOST_GRID_COLUMNS = 16384  # a panel of them is turned back on a thread's stack


class NativeMatrix:
    """A bfloat16 matrix [N, K] in one of the library's forms: N and K rounded up to 32, columns filled up with zeros.

    A matrix whose numbers lie on grids, as those that were once quantised to 4 bits do, takes 5 bits per number, any
    other 16. Both forms give the same products to the last bit.
    """

    __slots__ = ("_columns", "_function", "_missing", "_on_grid", "_packed", "_rows", "_threads")

    def __init__(self, library: Library, threads: Threads, weight: Tensor) -> None:
        assert can_pack(library, weight)
        self._rows = weight.shape[0]
        self._missing = -weight.shape[1] % _COLUMNS
        weight = functional.pad(weight, (0, self._missing)) if self._missing else weight.contiguous()
        self._columns = weight.shape[1]
        self._function = library.long.aserve_matmul
        self._threads = threads
        packed = _pack_on_grids(library, threads, weight)
        self._on_grid = packed is not None
        self._packed = _pack_plain(library, weight) if packed is None else packed

    @property
    def num_bytes(self) -> int:
        """Memory that the matrix takes."""
        return self._packed.numel() * self._packed.element_size()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x`` [T, K] times the matrix plus ``bias`` [N], [T, N] bfloat16, summed in float32."""
        if self._missing:
            x = functional.pad(x, (0, self._missing))
        elif x.stride(1) != 1:
            x = x.contiguous()
        tokens = x.shape[0]
        out = torch.empty((tokens, self._rows), dtype=torch.bfloat16, device=x.device)
        self._function(
            x.data_ptr(), self._packed.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), tokens,
            self._columns, self._rows, x.stride(0), self._rows, self._on_grid, self._threads(torch.bfloat16),
        )  # fmt: skip
        return out


def _pack_on_grids(library: Library, threads: Threads, weight: Tensor) -> Tensor | None:
    if weight.shape[1] > _MOST_GRID_COLUMNS:
        return None
    packed = torch.empty(library.long.aserve_grid_size(*weight.shape), dtype=torch.uint8, device=weight.device)
    number = threads(torch.bfloat16)
    return (
        packed if library.long.aserve_pack_grid(weight.data_ptr(), packed.data_ptr(), *weight.shape, number) else None
    )


def _pack_plain(library: Library, weight: Tensor) -> Tensor:
    size = library.long.aserve_packed_size(*weight.shape)
    packed = torch.empty(size, dtype=torch.bfloat16, device=weight.device)
    library.long.aserve_pack(weight.data_ptr(), packed.data_ptr(), *weight.shape)
    return packed


def can_pack(library: Library, weight: Tensor) -> bool:
    """Whether the library multiplies this matrix."""
    return bool(library.matmul) and weight.dtype == torch.bfloat16
