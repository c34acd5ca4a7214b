"""The gated activation of Gemma."""

import math

import pytest
import torch

from aserve_kernels.cases import OPERATIONS, make_inputs
from aserve_kernels.check import TOLERANCES, assert_agree

OPERATION = OPERATIONS["gelu_tanh_and_mul"]


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_the_reference_follows_the_formula(reference, dtype, shape):
    x = make_inputs(OPERATION, shape, dtype=dtype)["x"]
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(reference.gelu_tanh_and_mul(x).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_backends_agree_with_the_reference(backend, reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype, device=backend.device)
    assert_agree(OPERATION, backend.kernels, reference, inputs)


def test_the_result_goes_where_it_is_asked_to_go(backend, dtype):
    x = make_inputs(OPERATION, {"x": (3, 20)}, dtype=dtype, device=backend.device)["x"]
    before = x.clone()
    out = torch.empty(3, 20, dtype=dtype, device=backend.device)
    returned = backend.kernels.gelu_tanh_and_mul(x, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out, backend.kernels.gelu_tanh_and_mul(x))
    assert torch.equal(x, before)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_large_gates_neither_overflow_nor_vanish(backend, dtype):
    x = torch.tensor([[100.0, -100.0, 2.0, 2.0]], dtype=dtype, device=backend.device)
    assert backend.kernels.gelu_tanh_and_mul(x).tolist() == [[200.0, pytest.approx(0.0, abs=1e-30)]]
