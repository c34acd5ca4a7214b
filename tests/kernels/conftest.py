"""Backends under test. Without a GPU, Triton's kernels run in its interpreter, which is chosen before its import.

The CPU's kernels in C are compiled for the machine, and for lesser ones as far as this one can pretend to be them.
"""

import os
import platform
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from aserve_kernels import KernelSet, load
from aserve_kernels.cpu import TORCH_KERNELS, native_kernels
from aserve_kernels.cpu.native.build import BuildError, open_library
from aserve_kernels.cpu.native.library import Library

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


NATIVE = {
    "native": (),
    "native-without-amx": ("-DASERVE_WITHOUT_AMX",),
    "native-avx2": ("-march=x86-64-v3",),
    "native-sse": ("-march=x86-64",),
}
"""Flags that make the C sources into those of a lesser machine."""


@cache
def native_backend(name: str) -> KernelSet:
    flags = NATIVE[name]
    if flags and platform.machine() != "x86_64":
        pytest.skip("a form for x86-64")
    try:
        library, _ = open_library(None, extra_flags=flags)
    except BuildError as error:
        pytest.skip(str(error))
    return native_kernels(Library(library))


@pytest.fixture(
    params=[
        pytest.param(("torch", "cpu"), id="cpu-torch"),
        *(pytest.param((name, "cpu"), id=f"cpu-{name}") for name in NATIVE),
        pytest.param(("triton", "cpu"), id="triton-interpreted"),
        pytest.param(("triton", "cuda"), id="triton", marks=pytest.mark.gpu),
    ]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    name, device = request.param
    if name == "triton" and device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton compiles in this process, so it cannot interpret")
    if name in NATIVE:
        return Backend(native_backend(name), device)
    return Backend(TORCH_KERNELS if name == "torch" else load(name), device)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def reference() -> KernelSet:
    return load("reference")
