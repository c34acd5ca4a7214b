"""A matrix product with a plain weight."""

import pytest
import torch

from aserve_kernels.cases import OPERATIONS, make_inputs
from aserve_kernels.check import TOLERANCES, assert_agree

OPERATION = OPERATIONS["linear"]


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_the_reference_follows_the_formula(reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype)
    expected = inputs["x"].double() @ inputs["weight"].double().T
    if inputs["bias"] is not None:
        expected = expected + inputs["bias"].double()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(reference.linear(**inputs).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_backends_agree_with_the_reference(backend, reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype, device=backend.device)
    assert_agree(OPERATION, backend.kernels, reference, inputs)


def test_a_token_with_nan_leaves_the_others_alone(backend, reference, dtype):
    inputs = make_inputs(OPERATION, {"x": (3, 48), "rows": 5}, dtype=dtype, device=backend.device)
    expected = reference.linear(**inputs)
    inputs["x"][1] = float("nan")
    out = backend.kernels.linear(**inputs)
    assert out[1].isnan().all()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out[::2], expected[::2], rtol=tolerance, atol=tolerance)


def test_the_result_is_a_tensor_of_its_own(backend, dtype):
    inputs = make_inputs(OPERATION, {"x": (2, 48), "rows": 5}, dtype=dtype, device=backend.device)
    first, second = backend.kernels.linear(**inputs), backend.kernels.linear(**inputs)
    first.fill_(7)
    assert not (second == 7).any()
