"""RMS normalisation."""

import pytest
import torch

from aserve_kernels.cases import OPERATIONS, make_inputs
from aserve_kernels.check import TOLERANCES, assert_agree

OPERATION = OPERATIONS["rms_norm"]


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_the_reference_follows_the_formula(reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype)
    x, weight = inputs["x"].double(), inputs["weight"].double()
    expected = x / torch.sqrt((x * x).mean(-1, keepdim=True) + inputs["eps"]) * weight
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(reference.rms_norm(**inputs).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_backends_agree_with_the_reference(backend, reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype, device=backend.device)
    assert_agree(OPERATION, backend.kernels, reference, inputs)


@pytest.mark.parametrize("shape", [{"x": (1, 40)}, {"x": (3, 40), "gap": 4}], ids=str)
def test_the_result_may_replace_the_input(backend, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype, device=backend.device)
    expected = backend.kernels.rms_norm(**inputs)
    returned = backend.kernels.rms_norm(**inputs, out=inputs["x"])
    assert returned.data_ptr() == inputs["x"].data_ptr()
    torch.testing.assert_close(inputs["x"], expected, rtol=0, atol=0)


def test_the_input_is_kept_unless_it_is_the_output(backend, dtype):
    inputs = make_inputs(OPERATION, {"x": (4, 48)}, dtype=dtype, device=backend.device)
    before = inputs["x"].clone()
    backend.kernels.rms_norm(**inputs)
    assert torch.equal(inputs["x"], before)


def test_a_row_of_zeros_stays_zero(backend, dtype):
    x = torch.zeros(2, 16, dtype=dtype, device=backend.device)
    assert not backend.kernels.rms_norm(x, torch.ones_like(x[0]), 1e-6).any()


def test_a_float32_weight_scales_before_the_one_rounding(backend):
    """As Gemma's models do. In Llama's way one norm of this row would be another number."""
    if backend.interpreted:
        pytest.skip("Triton's interpreter cuts bfloat16 off instead of rounding")
    x = torch.tensor([[1.0, 2.0, 3.0, 5.0]] * 2, dtype=torch.bfloat16, device=backend.device)
    weight = torch.full((4,), 1.003, device=backend.device)
    exact = x[0].double() / x[0].double().square().mean().sqrt() * 1.003
    for rows in (x, x[:1]):
        normed = backend.kernels.rms_norm(rows, weight, 0.0)
        assert normed.dtype == torch.bfloat16
        assert torch.equal(normed, exact.bfloat16().expand_as(rows))
    rounded_twice = backend.kernels.rms_norm(x, weight.bfloat16(), 0.0)
    assert not torch.equal(rounded_twice, normed.expand_as(x))
