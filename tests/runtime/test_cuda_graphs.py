"""Shapes of graphs, and the static tensors that they read. Graphs themselves need a GPU: see test_cuda.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.capacity import Capacity
from aserve.core.request import SamplingParams
from aserve.core.step import NewSequence, ScheduledSequence, StepPlan
from aserve.layers.batch import ForwardBatch
from aserve.planning.step_shapes import StepShape, step_shapes
from aserve.runtime.cuda_graphs import ShapeTable, StaticBatch, compute
from aserve.runtime.forward_batch import BatchBuilder, PlanColumns
from aserve.runtime.kv_cache import KvCaches, allocate
from aserve.runtime.loader import load_model
from aserve.testing import tiny_llama
from aserve_kernels import load


@given(st.integers(1, 700), st.integers(1, 3000), st.data())
def test_a_step_finds_the_smallest_shape_that_holds_it(max_num_seqs, max_batch_tokens, data):
    shapes = step_shapes(max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens)
    num_seqs = data.draw(st.integers(1, min(max_num_seqs, max_batch_tokens)))
    num_tokens = data.draw(st.integers(num_seqs, max_batch_tokens))
    found = ShapeTable(shapes).find(num_tokens=num_tokens, num_seqs=num_seqs)
    fitting = [
        shape
        for shape in shapes
        if shape.prefill == (num_tokens > num_seqs) and shape.num_tokens >= num_tokens and shape.num_seqs >= num_seqs
    ]
    if found is None:
        assert num_tokens > num_seqs, "every decode has a graph"
        assert not fitting
    else:
        assert found in fitting
        assert found == min(fitting, key=lambda shape: (shape.num_tokens, shape.num_seqs))


def test_decodes_waste_little():
    sizes = [s.num_seqs for s in step_shapes(max_num_seqs=512, max_batch_tokens=8192) if not s.prefill]
    for before, after in zip(sorted(sizes), sorted(sizes)[1:], strict=False):
        assert after <= max(2 * before, 1.5 * before)
        assert before < 16 or after <= 1.5 * before


@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 1), (3, 9, 1)], ids=str)
def test_a_step_in_static_tensors_gives_the_logits_of_the_step_itself(tmp_path, lengths):
    capacity = Capacity(num_blocks=16, block_size=4, max_num_seqs=4, max_batch_tokens=32, max_model_len=16)
    with torch.inference_mode():
        model = load_model(
            tiny_llama(tmp_path), dtype=torch.float32, device=torch.device("cpu"), kernels=load("reference")
        )
        caches = allocate(model.spec, num_blocks=16, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
        cpu = torch.device("cpu")
        prefill = len(set(lengths)) > 1
        shape = StepShape(True, 16, 4) if prefill else StepShape(False, 4, 4)
        earlier = _batch(capacity, caches, (8, 8, 8, 8) if prefill else (1, 1, 1, 1))
        batch = _batch(capacity, caches, lengths)
        last = torch.tensor(lengths).cumsum(0) - 1 if prefill else None
        expected = compute(model, batch, last)
        wanted = [x.clone() for pair in caches for x in pair]

        static = StaticBatch(batch, max_num_tokens=32, max_num_seqs=4, table_width=capacity.table_width)
        larger = StepShape(prefill, 32, 4) if prefill else shape
        static.write(larger, earlier, torch.tensor([7, 15, 23, 31], device=cpu) if prefill else None)
        static.write(shape, batch, last)
        for cache in (x for pair in caches for x in pair):
            cache.zero_()
        logits = compute(model, *static.view(shape))[: len(lengths)]
        torch.testing.assert_close(logits, expected)
        for cache, want in zip((x for pair in caches for x in pair), wanted, strict=True):
            torch.testing.assert_close(cache, want, msg="places beyond the step have written to the cache")


def _batch(capacity: Capacity, caches: KvCaches, lengths: tuple[int, ...]) -> ForwardBatch:
    plan = _plan(lengths)
    return BatchBuilder(capacity, caches, torch.device("cpu")).build(plan, PlanColumns.of(plan))


def _plan(lengths: tuple[int, ...]) -> StepPlan:
    rows: list[ScheduledSequence] = []
    block = 0
    for slot, length in enumerate(lengths):
        blocks = tuple(range(block, block - (-length // 4)))
        block += len(blocks)
        new = NewSequence(SamplingParams(max_tokens=1), length, ())
        ids = tuple(range(3 + slot, 3 + slot + length))
        rows.append(ScheduledSequence(str(slot), slot, 0, ids, (blocks,), True, new))
    return StepPlan(0, tuple(rows))
