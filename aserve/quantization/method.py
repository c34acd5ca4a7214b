"""How a linear layer's weight is stored, filled from a checkpoint and multiplied.

A layer in ``aserve.layers.linear`` owns *which slice* of a matrix this rank holds; a ``LinearMethod`` owns *what a
weight is*. The two meet in ``MatrixSlice``. A scheme picks the method of each layer by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aserve_kernels.kernel_set import KernelSet


@dataclass(frozen=True, slots=True)
class MatrixSlice:
    """The part of a checkpoint's [rows, columns] matrix that this rank holds, and where its rows go.

    Attributes:
        rows: half-open range of the checkpoint's rows (output features).
        columns: half-open range of the checkpoint's columns (input features).
        offset: first row in this rank's matrix.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    offset: int = 0


class LinearMethod(Protocol):
    """The weight of one linear layer. Calls come in the order: create_weights, load (many), finish_loading, apply."""

    @property
    def group_size(self) -> int:
        """A sharded dimension must be a multiple of this, and each slice starts at one; 1 when any cut will do."""
        ...

    def create_weights(self, num_rows: int, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate this rank's [num_rows, num_columns] matrix; ``dtype`` is that of the activations."""
        ...

    def tensor_shapes(self, num_rows: int, num_columns: int) -> Mapping[str, tuple[int, ...]]:
        """Return name and shape of each tensor by which a checkpoint stores a whole [num_rows, num_columns] matrix."""
        ...

    def load(self, name: str, part: MatrixSlice, tensor: Tensor) -> None:
        """Copy ``part`` out of the checkpoint's whole ``tensor`` (its shape is checked); converts the dtype."""
        ...

    def adopt(self, weight: Tensor) -> None:
        """Use a plain [rows, columns] matrix that another layer holds (a tied head); replaces create and load."""
        ...

    def finish_loading(self) -> None:
        """Called once when everything was loaded: bring the weight into the form that ``apply`` reads fastest."""
        ...

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x`` [T, columns] times the matrix, plus ``bias`` [rows]: [T, rows] in x's dtype, a new tensor."""
        ...


class QuantScheme(Protocol):
    """Picks the method of each linear layer."""

    def method_for(self, layer_name: str, kernels: KernelSet) -> LinearMethod:
        """Return a fresh method for the layer, which multiplies with operations of ``kernels``.

        Names are those of the checkpoint, for example ``lm_head``.
        """
        ...
