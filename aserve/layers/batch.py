"""The tensors of one step, as a model sees them.

Built by the runtime once per step, read by every layer, changed by none. It lives here and not in the runtime because
layers may not import the runtime. Letters: T tokens of the step, S sequences, G KV groups (``core.kv_layout``), B
widest block table, N KV blocks, P tokens per block, Hkv KV heads of this rank, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class GroupTables(NamedTuple):
    """Where one KV group's layers write and read: ``slot_mapping`` [T] and ``block_table`` [S, B] of a ForwardBatch."""

    slot_mapping: Tensor
    block_table: Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Prefill chunks and decodes of one step, flattened: sequence s owns tokens ``[cu[s], cu[s + 1])``.

    Attributes:
        input_ids: [T] int64, each in [0, vocab_size).
        positions: [T] int64, each token's place in its sequence.
        slot_mapping: [G, T] int64, row of the caches that takes each token's key and value; negative: none.
        cu_seqlens_q: [S + 1] int32, running sum of the sequences' token counts, from 0.
        seq_lens: [S] int32, tokens of each sequence that are visible after this step (cached and new).
        block_tables: [G, S, B] int32, KV blocks of each sequence; places past its length name one of its own blocks,
            those behind the group's window any block.
        max_query_len: largest token count of a sequence in this step.
        max_seq_len: largest of ``seq_lens``.
        kv_caches: (keys, values) of the layers of a group, each [N, P, Hkv, D]; all groups share them.
        groups: the two tables by group, cut once per step and not in every layer.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int
    kv_caches: tuple[tuple[Tensor, Tensor], ...]
    groups: tuple[GroupTables, ...] = field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.slot_mapping.unbind(), self.block_tables.unbind(), strict=True)
        object.__setattr__(self, "groups", tuple([GroupTables(*pair) for pair in pairs]))
