"""Norms of heads, rotary embedding and the write to the cache, in one."""

import pytest
import torch

from aserve_kernels.cases import OPERATIONS, make_inputs
from aserve_kernels.check import assert_agree

OPERATION = OPERATIONS["rotary_and_store"]


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_backends_agree_with_the_parts_of_the_reference(backend, reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype, device=backend.device)
    assert_agree(OPERATION, backend.kernels, reference, inputs)


def test_a_skipped_token_leaves_the_cache_alone(backend, dtype):
    shape = {**OPERATION.shapes[1], "skipped": range(5)}
    inputs = make_inputs(OPERATION, shape, dtype=dtype, device=backend.device)
    before = inputs["k_cache"].clone(), inputs["v_cache"].clone()
    backend.kernels.rotary_and_store(**inputs)
    assert torch.equal(inputs["k_cache"], before[0])
    assert torch.equal(inputs["v_cache"], before[1])


def test_a_swapped_part_counts_where_nothing_is_fused(reference):
    stored = []
    kernels = reference.replace(store_kv=lambda *arguments: stored.append(arguments))
    inputs = make_inputs(OPERATION, OPERATION.shapes[0], dtype=torch.float32)
    kernels.rotary_and_store(**inputs)
    assert len(stored) == 1
