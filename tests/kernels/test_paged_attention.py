"""Attention over the paged cache."""

import math

import pytest
import torch

from aserve_kernels import load
from aserve_kernels.cases import OPERATIONS, make_inputs
from aserve_kernels.check import TOLERANCES, assert_agree

OPERATION = OPERATIONS["paged_attention"]
MIXED = OPERATION.shapes[6]


def naive(inputs):
    """Every query and head by itself, position by position, in float64."""
    q, window = inputs["q"].double(), inputs["window"] or math.inf
    out = torch.zeros_like(q)
    block_size, num_kv_heads = inputs["k_cache"].shape[1:3]
    bounds = inputs["cu_seqlens_q"].tolist()
    for s, seq_len in enumerate(inputs["seq_lens"].tolist()):
        for row in range(bounds[s], bounds[s + 1]):
            position = seq_len - bounds[s + 1] + row
            seen = [p for p in range(position + 1) if p > position - window]
            if not seen:
                continue
            places = [(int(inputs["block_tables"][s, p // block_size]), p % block_size) for p in seen]
            keys = torch.stack([inputs["k_cache"][place] for place in places]).double()
            values = torch.stack([inputs["v_cache"][place] for place in places]).double()
            for head in range(q.shape[1]):
                kv_head = head * num_kv_heads // q.shape[1]
                scores = keys[:, kv_head] @ q[row, head] * inputs["scale"]
                if inputs["softcap"]:
                    scores = inputs["softcap"] * torch.tanh(scores / inputs["softcap"])
                weights = torch.softmax(scores, dim=0)
                out[row, head] = weights @ values[:, kv_head]
    return out


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_the_reference_attends_to_what_it_may_see(reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype)
    tolerance = TOLERANCES[dtype]
    result = reference.paged_attention(**inputs).double()
    torch.testing.assert_close(result, naive(inputs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_backends_agree_with_the_reference(backend, reference, dtype, shape):
    inputs = make_inputs(OPERATION, shape, dtype=dtype, device=backend.device)
    assert_agree(OPERATION, backend.kernels, reference, inputs)


@pytest.mark.parametrize(
    "shape",
    [
        # longer than a query tile of the CPU's, with and without a past and a window
        {"heads": 2, "kv_heads": 1, "dim": 16, "block_size": 16, "query_lens": [300], "seq_lens": [700]},
        {"heads": 2, "kv_heads": 1, "dim": 16, "block_size": 16, "query_lens": [600], "seq_lens": [600], "window": 130},
        {"heads": 2, "kv_heads": 1, "dim": 16, "block_size": 16, "query_lens": [290], "seq_lens": [290]},
        {"heads": 2, "kv_heads": 1, "dim": 16, "block_size": 16, "query_lens": [290], "seq_lens": [290], "softcap": 1},
        # decodes of very different lengths, more than one group of them
        {"heads": 2, "kv_heads": 1, "dim": 16, "block_size": 16, "query_lens": [1] * 5,
         "seq_lens": [2500, 3, 9, 2400, 1200]},
    ],
    ids=str,
)  # fmt: skip
def test_long_sequences(backend, reference, shape):
    inputs = make_inputs(OPERATION, shape, dtype=torch.float32, device=backend.device)
    assert_agree(OPERATION, backend.kernels, reference, inputs)


def test_the_result_goes_where_it_is_asked_to_go(backend, dtype):
    inputs = make_inputs(OPERATION, MIXED, dtype=dtype, device=backend.device)
    expected = backend.kernels.paged_attention(**inputs)
    out = torch.full_like(expected, 7)
    returned = backend.kernels.paged_attention(**inputs, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)


def test_bounds_on_lengths_may_be_generous(backend, reference):
    inputs = make_inputs(OPERATION, MIXED, dtype=torch.float32, device=backend.device)
    inputs.update(max_query_len=500, max_seq_len=9000)
    assert_agree(OPERATION, backend.kernels, reference, inputs)


@pytest.mark.parametrize("shape", [MIXED, OPERATION.shapes[2], OPERATION.shapes[3]], ids=str)
def test_nothing_of_what_lies_behind_its_end_reaches_a_sequence(backend, shape):
    """Its last block and its table's padding lead to places that are not its own; any finite number may be there."""
    inputs = make_inputs(OPERATION, shape, dtype=torch.float32, device=backend.device)
    expected = backend.kernels.paged_attention(**inputs)
    block_size = inputs["k_cache"].shape[1]
    owned = torch.zeros(inputs["k_cache"].shape[:2], dtype=torch.bool)
    for s, seq_len in enumerate(inputs["seq_lens"].tolist()):
        for position in range(seq_len):
            owned[int(inputs["block_tables"][s, position // block_size]), position % block_size] = True
    for s, seq_len in enumerate(inputs["seq_lens"].tolist()):
        inputs["block_tables"][s, -(-seq_len // block_size) :] = inputs["block_tables"][s, 0]
    for cache in (inputs["k_cache"], inputs["v_cache"]):
        cache[~owned] = 1e30
    torch.testing.assert_close(backend.kernels.paged_attention(**inputs), expected)


WINDOWED = [
    {"heads": 4, "kv_heads": 2, "dim": 16, "block_size": 4, "query_lens": [1] * 3, "seq_lens": [90, 33, 4],
     "window": 6},
    {"heads": 4, "kv_heads": 2, "dim": 16, "block_size": 4, "query_lens": [11], "seq_lens": [90], "window": 6},
    {"heads": 4, "kv_heads": 2, "dim": 16, "block_size": 8, "query_lens": [30, 1, 3], "seq_lens": [75, 61, 3],
     "window": 10, "softcap": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("shape", WINDOWED, ids=str)
@pytest.mark.parametrize("name", ["reference", "backend"])
def test_blocks_behind_the_window_are_not_let_in(backend, reference, name, shape):
    """They may belong to another sequence by now, and hold NaN."""
    kernels = reference if name == "reference" else backend.kernels
    inputs = make_inputs(OPERATION, shape, dtype=torch.float32, device=backend.device)
    expected = reference.paged_attention(**inputs)
    block_size, bounds = shape["block_size"], inputs["cu_seqlens_q"].tolist()
    num_blocks = len(inputs["k_cache"])
    for cache in ("k_cache", "v_cache"):
        spoiled = torch.full_like(inputs[cache][:1], math.nan)
        inputs[cache] = torch.cat((inputs[cache], spoiled))
    for s, seq_len in enumerate(shape["seq_lens"]):
        first_query = seq_len - (bounds[s + 1] - bounds[s])
        num_hidden = max(0, first_query - shape["window"] + 1) // block_size
        inputs["block_tables"][s, :num_hidden] = num_blocks
    torch.testing.assert_close(kernels.paged_attention(**inputs), expected)


@pytest.mark.parametrize("shape", OPERATION.shapes, ids=str)
def test_a_default_device_that_the_program_set_does_not_matter(reference, shape):
    inputs = make_inputs(OPERATION, shape, dtype=torch.float32)
    with torch.device("meta"):
        result = load("cpu").paged_attention(**inputs)
    torch.testing.assert_close(result, reference.paged_attention(**inputs))
