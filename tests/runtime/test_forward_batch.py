"""Plans to tensors: block tables from deltas, positions, cache rows, pending tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch

from aserve.core.capacity import Capacity
from aserve.core.request import SamplingParams
from aserve.core.step import NO_BLOCK, PENDING, NewSequence, ScheduledSequence, StepPlan
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
    assert batch.slot_mapping.tolist() == [[8 * 4 + 2, 80, 81, 82, 83, 40]]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 6]
    assert batch.seq_lens.tolist() == [7, 5]
    assert batch.block_tables.tolist() == [[[7, 8], [20, 10]]]
    assert (batch.max_query_len, batch.max_seq_len) == (5, 7)
    dtypes = {name: getattr(batch, name).dtype for name in ("input_ids", "positions", "slot_mapping")}
    assert set(dtypes.values()) == {torch.int64}
    dtypes = {name: getattr(batch, name).dtype for name in ("cu_seqlens_q", "seq_lens", "block_tables")}
    assert set(dtypes.values()) == {torch.int32}


def test_block_ids_append_and_a_new_sequence_resets() -> None:
    builder = make_builder()
    build(builder, (1, 0, (1, 1, 1, 1), (5,), True))
    batch = build(builder, (1, 4, (1,), (6, 3), False))
    assert batch.block_tables.tolist() == [[[5, 6]]]
    batch = build(builder, (1, 5, (1, 1, 1, 1), (), False))
    assert batch.block_tables.tolist() == [[[5, 6, 3]]]
    assert batch.slot_mapping.tolist() == [[25, 26, 27, 12]]
    batch = build(builder, (1, 8, (1,), (30, 31, 32), True))  # resumed, two blocks from the prefix cache
    assert batch.block_tables.tolist() == [[[30, 31, 32]]]
    assert batch.slot_mapping.tolist() == [[32 * 4]]


def test_a_sequence_of_the_whole_context() -> None:
    builder = make_builder()
    batch = build(builder, (0, 0, tuple(range(30)), tuple(range(8)), True))
    assert batch.block_tables.shape == (1, 1, 8)
    assert batch.slot_mapping.tolist() == [list(range(30))]


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


GROUPED = replace(CAPACITY, windows=(None, 6, 6))


def build_grouped(
    builder: BatchBuilder, *rows: tuple[int, int, int, tuple[tuple[int, ...], ...], bool]
) -> ForwardBatch:
    """Rows are (slot, start, number of tokens, new_block_ids, new)."""
    plan = StepPlan(
        0, tuple(ScheduledSequence("r", slot, start, (1,) * count, blocks, True, NEW if new else None)
                 for slot, start, count, blocks, new in rows)
    )  # fmt: skip
    return builder.build(plan, PlanColumns.of(plan))


def test_each_group_has_its_tables() -> None:
    builder = BatchBuilder(GROUPED, (), torch.device("cpu"))
    build_grouped(builder, (2, 0, 4, ((1,), (2,), (3,)), True))
    batch = build_grouped(
        builder, (2, 4, 1, ((4,), (5,), (6,)), False), (0, 0, 6, ((10, 11), (12, 13), (14, 15)), True)
    )
    assert batch.block_tables.tolist() == [[[1, 4], [10, 11]], [[2, 5], [12, 13]], [[3, 6], [14, 15]]]
    assert batch.slot_mapping.tolist() == [
        [4 * 4, 40, 41, 42, 43, 44, 45], [5 * 4, 48, 49, 50, 51, 52, 53], [6 * 4, 56, 57, 58, 59, 60, 61],
    ]  # fmt: skip
    for group in range(3):
        slot_mapping, block_table = batch.groups[group]
        assert torch.equal(slot_mapping, batch.slot_mapping[group])
        assert torch.equal(block_table, batch.block_tables[group])
        assert slot_mapping.is_contiguous()
        assert block_table.is_contiguous()


def test_what_a_window_has_left_behind_is_some_block() -> None:
    """And places past a sequence's end never name a block that it has let go of."""
    builder = BatchBuilder(GROUPED, (), torch.device("cpu"))
    resumed = ((1, 2, 3, 4), (NO_BLOCK, 5, 6, 7), (NO_BLOCK, NO_BLOCK, 8, 9))
    batch = build_grouped(builder, (1, 12, 3, resumed, True), (0, 0, 23, (tuple(range(10, 16)),) * 3, True))
    rows = batch.block_tables[:, 0].tolist()
    assert rows[0][:4] == [1, 2, 3, 4]
    assert rows[1][1:4] == [5, 6, 7]
    assert rows[2][2:4] == [8, 9]
    assert batch.block_tables.min() >= 1
    assert [row[4:] for row in rows[1:]] == [[7, 7], [9, 9]]
    assert batch.slot_mapping[:, :3].tolist() == [[16, 17, 18], [28, 29, 30], [36, 37, 38]]
    batch = build_grouped(builder, (1, 15, 1, (), False), (0, 23, 1, (), False))
    batch = build_grouped(builder, (1, 16, 1, ((20,), (21,), (22,)), False), (0, 24, 1, ((23,),) * 3, False))
    assert [row[4:] for row in batch.block_tables[:, 0].tolist()] == [[20, 1, 1], [21, 21, 21], [22, 22, 22]]


def test_blocks_are_cleared_when_handed_out_whatever_their_group() -> None:
    caches = tuple((torch.ones(50, 4, 1, 2), torch.ones(50, 4, 1, 2)) for _ in range(2))
    builder = BatchBuilder(GROUPED, caches, torch.device("cpu"))
    # a prefix of two blocks, of which the windows need one and none
    resumed = ((1, 2, 3), (NO_BLOCK, 5, 6), (NO_BLOCK, NO_BLOCK, 8))
    build_grouped(builder, (1, 8, 3, resumed, True))
    build_grouped(builder, (1, 11, 4, ((20,), (21,), (22,)), False))
    for cache in chain(*caches):
        assert [n for n in range(50) if not cache[n].any()] == [3, 6, 8, 20, 21, 22]
