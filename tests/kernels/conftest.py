"""Backends under test. Without a GPU, Triton's kernels run in its interpreter, which is chosen before its import."""

import os
from dataclasses import dataclass

import pytest
import torch

from aserve_kernels import KernelSet, load

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@dataclass(frozen=True)
class Backend:
    kernels: KernelSet
    device: str

    @property
    def interpreted(self) -> bool:
        """Whether each operation on a tile takes about a tenth of a millisecond."""
        return self.kernels.name == "triton" and self.device == "cpu"


@pytest.fixture(
    params=[
        pytest.param(("cpu", "cpu"), id="cpu"),
        pytest.param(("triton", "cpu"), id="triton-interpreted"),
        pytest.param(("triton", "cuda"), id="triton", marks=pytest.mark.gpu),
    ]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    name, device = request.param
    if name == "triton" and device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton compiles in this process, so it cannot interpret")
    return Backend(load(name), device)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def reference() -> KernelSet:
    return load("reference")
