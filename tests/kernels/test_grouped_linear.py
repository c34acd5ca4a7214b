"""Matrix products by groups of rows, as experts have them."""

import pytest
import torch

from aserve_kernels.cases import OPERATIONS, make_inputs
from aserve_kernels.check import TOLERANCES, assert_agree

OPERATION = OPERATIONS["grouped_linear"]


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_the_reference_follows_the_formula(reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype)
    groups = [n for n, count in enumerate(shape["counts"]) for _ in range(count)]
    matrices = inputs["weight"].double()[torch.tensor(groups, dtype=torch.int64)]
    expected = torch.einsum("rk,rnk->rn", inputs["x"].double(), matrices)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(reference.grouped_linear(**inputs).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_backends_agree_with_the_reference(backend, reference, dtype, shape):
    assert_agree(
        OPERATION, backend.kernels, reference, make_inputs(OPERATION, shape, dtype=dtype, device=backend.device)
    )
