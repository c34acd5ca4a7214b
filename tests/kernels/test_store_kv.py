"""Writing keys and values into the paged cache."""

import pytest
import torch

from aserve_kernels.cases import OPERATIONS, make_inputs
from aserve_kernels.check import results

OPERATION = OPERATIONS["store_kv"]


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_the_reference_writes_the_named_rows_and_no_others(reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype)
    expected = {"k": inputs["k_cache"].clone(), "v": inputs["v_cache"].clone()}
    block_size = shape["block_size"]
    for token, slot in enumerate(inputs["slot_mapping"].tolist()):
        for name, cache in expected.items():
            if slot >= 0:
                cache[slot // block_size, slot % block_size] = inputs[name][token]
    reference.store_kv(**inputs)
    for name, cache in expected.items():
        assert torch.equal(inputs[f"{name}_cache"], cache)


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_backends_write_exactly_what_the_reference_writes(backend, reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype, device=backend.device)
    for actual, expected in zip(
        results(OPERATION, backend.kernels, inputs), results(OPERATION, reference, inputs), strict=True
    ):
        assert torch.equal(actual, expected)
