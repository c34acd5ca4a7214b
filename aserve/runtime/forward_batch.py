"""From plan rows to the tensors of a step: what every slot's block table is, and how a step is laid out.

Plans carry only new block ids, so the tables kept here are a function of the plans seen so far. What lies behind a
sequence's end is its own: table entries past its blocks repeat one of them, and on the CPU a block is zeroed when a
sequence gets it. So kernels that read in whole blocks and mask afterwards never meet another request's NaN, which no
mask hides (0 * NaN is NaN). What lies behind a window is not read at all. Knows nothing of models or sampling, apart
from the last token of each slot, which stays on the device for rows that continue a token still in flight. Called by
the model runner, once per step, in step order.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.core.capacity import Capacity
from aserve.core.step import NO_BLOCK, PENDING, StepPlan
from aserve.layers.batch import ForwardBatch
from aserve.runtime.transfer import to_device

Ints = NDArray[np.int64]


class PlanColumns(NamedTuple):
    """A plan's rows as columns.

    Attributes:
        slots: [S] int64.
        starts: [S] int64, position of each row's first token.
        lengths: [S] int64, tokens of each row.
        sampling: [S'] int64, indices of the rows that sample.
    """

    slots: Ints
    starts: Ints
    lengths: Ints
    sampling: Ints

    @classmethod
    def of(cls, plan: StepPlan) -> PlanColumns:
        _, slots, starts, token_ids, _, samples, _ = zip(*plan.sequences, strict=True)
        return cls(
            np.array(slots, np.int64),
            np.array(starts, np.int64),
            np.fromiter(map(len, token_ids), np.int64, len(token_ids)),
            np.flatnonzero(np.array(samples, np.bool_)),
        )


class BatchBuilder:
    """The block tables of all slots, and the step's layout. Used by one thread, in step order."""

    def __init__(self, capacity: Capacity, kv_caches: tuple[tuple[Tensor, Tensor], ...], device: torch.device) -> None:
        self._block_size = capacity.block_size
        self._kv_caches = kv_caches
        self._device = device
        num_slots = capacity.max_num_seqs
        self._tables = np.zeros((capacity.num_groups, num_slots, capacity.table_width), np.int32)
        self._flat_tables = self._tables.reshape(capacity.num_groups, -1)
        self._has_window = [window is not None for window in capacity.windows]
        self._num_blocks = [0] * num_slots  # entries of a slot's table, in every group
        self._last_tokens = torch.zeros(capacity.max_num_seqs, dtype=torch.int64, device=device)

    def build(self, plan: StepPlan, columns: PlanColumns) -> ForwardBatch:
        """Apply the plan's block ids to the tables and lay out its tokens."""
        self._grow_tables(plan)
        slots, starts, lengths, _ = columns
        num_rows = len(slots)
        bounds = np.zeros(num_rows + 1, np.int32)
        np.cumsum(lengths, out=bounds[1:])
        num_tokens = int(bounds[-1])
        ids = np.fromiter(chain.from_iterable(row.token_ids for row in plan.sequences), np.int64, num_tokens)
        row_of = np.repeat(np.arange(num_rows), lengths)
        positions = np.arange(num_tokens) + (starts - bounds[:-1])[row_of]
        pages, places = np.divmod(positions, self._block_size)
        entries = slots[row_of] * self._tables.shape[2] + pages
        slot_mapping = self._flat_tables.take(entries, axis=1) * np.int64(self._block_size) + places
        seq_lens = starts + lengths
        max_seq_len = int(seq_lens.max())
        tables = self._tables[:, :, : -(-max_seq_len // self._block_size)].take(slots, axis=1)
        pending = np.flatnonzero(ids == PENDING)
        arrays = (
            ids,
            positions,
            slot_mapping,
            bounds,
            seq_lens.astype(np.int32),
            tables,
            pending,
            slots[row_of[pending]],
        )
        sent = to_device(arrays, self._device)
        if len(pending):
            sent[0][sent[6]] = self._last_tokens[sent[7]]
        return ForwardBatch(
            *sent[:6], max_query_len=int(lengths.max()), max_seq_len=max_seq_len, kv_caches=self._kv_caches
        )

    def remember(self, slots: Tensor, token_ids: Tensor) -> None:
        """Keep the sampled ``token_ids`` [S'] int64 of ``slots`` [S'] for rows that name them as pending."""
        # A row whose sampling failed keeps token 0: its request is over, but one more step may be in flight already.
        self._last_tokens[slots] = token_ids.clamp_min(0)

    def _grow_tables(self, plan: StepPlan) -> None:
        fresh: list[int] = []
        for _, slot, start, _, group_block_ids, _, new in plan.sequences:
            if not group_block_ids:
                continue
            count = 0 if new is not None else self._num_blocks[slot]
            self._num_blocks[slot] = end = count + len(group_block_ids[0])
            num_cached = start // self._block_size if new is not None else 0  # holds a reused prefix
            for table, has_window, block_ids in zip(self._tables, self._has_window, group_block_ids, strict=True):
                row = table[slot]
                if has_window or new is not None:
                    # The tail repeats a block that the sequence still has: under a window, that is the last one.
                    row[count:] = block_ids[-1 if has_window else 0]
                behind = block_ids.count(NO_BLOCK) if has_window else 0  # they come first
                row[count + behind : end] = block_ids[behind:]
                fresh += block_ids[num_cached:]  # what is behind the window was cached
        if fresh and self._device.type == "cpu":
            self._zero(fresh)

    def _zero(self, block_ids: list[int]) -> None:
        """Clear blocks of what they held: 0.2 ms for 30 layers, in the steps in which a sequence gets a block.

        Kernels for GPUs load nothing beyond a sequence's end, and need no help.
        """
        index = torch.tensor(block_ids, device=self._device)
        for keys, values in self._kv_caches:
            keys.index_fill_(0, index, 0)
            values.index_fill_(0, index, 0)
