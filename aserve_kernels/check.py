"""What every backend is held to: tolerances, and the comparison of two kernel sets on the same inputs.

Used by the tests, and by whoever looks for the one wrong kernel of a set.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from aserve_kernels.cases import Inputs, Operation
from aserve_kernels.kernel_set import KernelSet
from aserve_kernels.reference import KERNELS as REFERENCE

TOLERANCES: Final = MappingProxyType({torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3})
"""Largest difference allowed, both relative and absolute, by dtype: two or three roundings of values around 1."""

BORDER: Final = 1e-5
"""How near a uniform must be to a cumulative probability for two samplers to be allowed to differ."""


def results(operation: Operation, kernels: KernelSet, inputs: Inputs) -> list[Tensor]:
    """Call the operation on copies of what it may overwrite; return what it returned and wrote."""
    arguments = {name: _copy(x) if name in operation.written else x for name, x in inputs.items()}
    returned = getattr(kernels, operation.name)(**arguments)
    tensors = list(returned) if isinstance(returned, tuple) else [] if returned is None else [returned]
    return tensors + [arguments[name] for name in operation.compared]


def assert_agree(operation: Operation, kernels: KernelSet, against: KernelSet, inputs: Inputs) -> None:
    """Raise AssertionError unless both kernel sets give the same results, within the tolerance of their dtype."""
    actual, expected = results(operation, kernels, inputs), results(operation, against, inputs)
    if operation.name == "sample":
        assert_tokens_agree(actual[0], expected[0], inputs)
        return
    for x, y in zip(actual, expected, strict=True):
        tolerance = TOLERANCES[y.dtype]
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def assert_tokens_agree(actual: Tensor, expected: Tensor, inputs: Inputs) -> None:
    """Raise AssertionError where tokens differ although the uniform is not at the border of two tokens."""
    for row in (actual != expected).nonzero().flatten().tolist():
        single = {name: x[row : row + 1] for name, x in inputs.items()}
        near = (single["uniforms"] + torch.linspace(-BORDER, BORDER, 21, device=actual.device)).clamp(0, 1 - 2**-24)
        accepted = {int(REFERENCE.sample(**{**single, "uniforms": near[i : i + 1]})) for i in range(len(near))}
        token = int(actual[row])
        described = {name: x.item() for name, x in single.items() if x.numel() == 1}
        assert token in accepted, f"row {row} drew {token}, not one of {sorted(accepted)}: {described}"


def _copy(x: Tensor) -> Tensor:
    """Return a copy with the same strides, in memory of its own."""
    storage = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device=x.device)
    copy = storage.as_strided(x.shape, x.stride(), x.storage_offset())
    return copy.copy_(x)
