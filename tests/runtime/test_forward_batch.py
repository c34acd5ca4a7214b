"""Plans to tensors: block tables from deltas, positions, cache rows, pending tokens."""

from __future__ import annotations

import torch

from aserve.core.capacity import Capacity
from aserve.core.request import SamplingParams
from aserve.core.step import PENDING, NewSequence, ScheduledSequence, StepPlan
from aserve.layers.batch import ForwardBatch
from aserve.runtime.forward_batch import BatchBuilder, PlanColumns

CAPACITY = Capacity(num_blocks=50, block_size=4, max_num_seqs=4, max_batch_tokens=100, max_model_len=30)
NEW = NewSequence(SamplingParams(max_tokens=1), 1, ())


def make_builder() -> BatchBuilder:
    return BatchBuilder(CAPACITY, (), torch.device("cpu"))


def build(builder: BatchBuilder, *rows: tuple[int, int, tuple[int, ...], tuple[int, ...], bool]) -> ForwardBatch:
    """Rows are (slot, start, token_ids, new_block_ids, new), of one group."""
    plan = StepPlan(
        0, tuple(ScheduledSequence("r", slot, start, ids, (blocks,) if blocks else (), True, NEW if new else None)
                 for slot, start, ids, blocks, new in rows)
    )  # fmt: skip
    return builder.build(plan, PlanColumns.of(plan))


def test_columns() -> None:
    rows = [(3, 5, (1, 2), True), (0, 9, (1,), False), (1, 0, (4, 5, 6), True)]
    plan = StepPlan(0, tuple(ScheduledSequence("r", s, a, ids, (), samples, None) for s, a, ids, samples in rows))
    columns = PlanColumns.of(plan)
    assert columns.slots.tolist() == [3, 0, 1]
    assert columns.starts.tolist() == [5, 9, 0]
    assert columns.lengths.tolist() == [2, 1, 3]
    assert columns.sampling.tolist() == [0, 2]


def test_mixed_step() -> None:
    builder = make_builder()
    build(builder, (2, 0, (9,) * 6, (7, 8), True))
    batch = build(builder, (2, 6, (61,), (), False), (0, 0, (1, 2, 3, 4, 5), (20, 10), True))
    assert batch.input_ids.tolist() == [61, 1, 2, 3, 4, 5]
    assert batch.positions.tolist() == [6, 0, 1, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [8 * 4 + 2, 80, 81, 82, 83, 40]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 6]
    assert batch.seq_lens.tolist() == [7, 5]
    assert batch.block_tables.tolist() == [[7, 8], [20, 10]]
    assert (batch.max_query_len, batch.max_seq_len) == (5, 7)
    dtypes = {name: getattr(batch, name).dtype for name in ("input_ids", "positions", "slot_mapping")}
    assert set(dtypes.values()) == {torch.int64}
    dtypes = {name: getattr(batch, name).dtype for name in ("cu_seqlens_q", "seq_lens", "block_tables")}
    assert set(dtypes.values()) == {torch.int32}


def test_block_ids_append_and_a_new_sequence_resets() -> None:
    builder = make_builder()
    build(builder, (1, 0, (1, 1, 1, 1), (5,), True))
    batch = build(builder, (1, 4, (1,), (6, 3), False))
    assert batch.block_tables.tolist() == [[5, 6]]
    batch = build(builder, (1, 5, (1, 1, 1, 1), (), False))
    assert batch.block_tables.tolist() == [[5, 6, 3]]
    assert batch.slot_mapping.tolist() == [25, 26, 27, 12]
    batch = build(builder, (1, 8, (1,), (30, 31, 32), True))  # resumed, two blocks from the prefix cache
    assert batch.block_tables.tolist() == [[30, 31, 32]]
    assert batch.slot_mapping.tolist() == [32 * 4]


def test_a_sequence_of_the_whole_context() -> None:
    builder = make_builder()
    batch = build(builder, (0, 0, tuple(range(30)), tuple(range(8)), True))
    assert batch.block_tables.shape == (1, 8)
    assert batch.slot_mapping.tolist() == list(range(30))


def test_pending_tokens_are_what_the_slot_sampled_last() -> None:
    builder = make_builder()
    first = (0, 0, (1,), (1,), True), (3, 0, (1,), (2,), True), (2, 0, (1,), (3,), True)
    build(builder, *first)
    builder.remember(torch.tensor([0, 3, 2]), torch.tensor([100, 103, 102]))
    batch = build(
        builder, (2, 1, (PENDING,), (), False), (1, 0, (8, 9), (4,), True), (0, 1, (55,), (), False),
        (3, 1, (PENDING,), (), False),
    )  # fmt: skip
    assert batch.input_ids.tolist() == [102, 8, 9, 55, 103]


def test_the_token_after_a_failed_row_is_still_a_token() -> None:
    builder = make_builder()
    build(builder, (0, 0, (1,), (1,), True))
    builder.remember(torch.tensor([0]), torch.tensor([-2]))
    assert build(builder, (0, 1, (PENDING,), (), False)).input_ids.tolist() == [0]
