"""A context for layers of one rank of many, without processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import aserve_kernels
from aserve.layers.context import LayerContext
from aserve.quantization.unquantized import UnquantizedScheme


@dataclass(frozen=True)
class FakeGroup:
    """Rank ``rank`` of ``size``; partial results are returned as they are, for the test to put together."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


@pytest.fixture
def context() -> Callable[..., LayerContext]:
    def make(rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> LayerContext:
        return LayerContext(
            kernels=aserve_kernels.load("reference"),
            group=FakeGroup(rank, size),
            quant=UnquantizedScheme(),
            dtype=dtype,
            device=torch.device("cpu"),
        )

    return make
