"""Residual addition and RMS normalisation in one."""

import pytest
import torch

from aserve_kernels.cases import OPERATIONS, make_inputs
from aserve_kernels.check import TOLERANCES, assert_agree

OPERATION = OPERATIONS["fused_add_rms_norm"]


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_the_reference_follows_the_formula(reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype)
    total = inputs["x"].double() + inputs["residual"].double()
    expected = total / torch.sqrt((total * total).mean(-1, keepdim=True) + inputs["eps"]) * inputs["weight"].double()
    tolerance = TOLERANCES[dtype]
    normed, residual = reference.fused_add_rms_norm(**inputs)
    torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(residual.double(), total, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_backends_agree_with_the_reference(backend, reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype, device=backend.device)
    assert_agree(OPERATION, backend.kernels, reference, inputs)


def test_the_sum_is_rounded_before_it_is_normalised(backend):
    """The next layer adds to the stored sum, so the norm has to see that one."""
    x = torch.full((1, 4), 2**-9, dtype=torch.bfloat16, device=backend.device)
    residual = torch.ones_like(x)
    normed, total = backend.kernels.fused_add_rms_norm(x, residual, torch.ones_like(x[0]), 0.0)
    assert total.tolist() == [[1.0] * 4]
    assert normed.tolist() == [[1.0] * 4]
