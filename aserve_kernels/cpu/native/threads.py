"""How many threads an engine's operations run on, and which."""

from __future__ import annotations

import torch

from aserve_kernels.cpu.native.library import Library


class Threads:
    """The threads of one kernel set; called with a dtype, it returns what the library's functions take.

    Where the library multiplies the matrices, its own threads run everything, and torch keeps to the calling one: its
    few operations left are short, and OpenMP's threads would take a core for milliseconds after each. Otherwise torch
    multiplies on OpenMP's threads, and the library's operations run on these as well.
    """

    __slots__ = ("_has_libgomp", "_multiplies", "_number")

    def __init__(self, library: Library) -> None:
        self._multiplies = bool(library.matmul)
        self._has_libgomp = library.has_libgomp
        self._number: int | None = None

    def use(self, number: int, dtype: torch.dtype) -> None:
        """See ``KernelSet.use_threads``."""
        self._number = number
        torch.set_num_threads(1 if self._multiplies and dtype == torch.bfloat16 else number)

    def __call__(self, dtype: torch.dtype) -> int:
        number = torch.get_num_threads() if self._number is None else self._number
        own = (self._multiplies and dtype == torch.bfloat16) or not self._has_libgomp
        return number if own else -number
