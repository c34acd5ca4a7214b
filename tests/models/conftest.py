"""Small random checkpoints of every family, written with transformers, and a paged cache to run aserve's models on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.core.kv_layout import KVLayout
from aserve.layers.batch import ForwardBatch
from aserve.models.model import Model
from tests.checkpoints import FAMILIES, write_checkpoint

BLOCK_SIZE = 4
NUM_BLOCKS = 160


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a family's name and changes of its config to a checkpoint folder, written once."""
    root = tmp_path_factory.mktemp("checkpoints")
    written: dict[str, Path] = {}

    def get(family: str, **changes: Any) -> Path:
        key = family + repr(sorted(changes.items()))
        if key not in written:
            written[key] = write_checkpoint(root / str(len(written)), {**FAMILIES[family], **changes})
        return written[key]

    return get


class PagedRun:
    """Runs a model step by step on a small paged cache whose block tables are scattered.

    Blocks that fall behind a group's window are used again at once, so nothing of them may be read.
    """

    def __init__(self, model: Model) -> None:
        spec, ctx = model.spec, model.ctx
        self._model = model
        self._layout = KVLayout.of(spec.sliding_windows)
        shape = (NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self._caches = tuple(
            # Rubbish that would be seen if a block were read that nobody wrote.
            (torch.full(shape, 1e4, dtype=ctx.dtype), torch.full(shape, 1e4, dtype=ctx.dtype))
            for _ in range(self._layout.layers_per_group)
        )
        self._free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
        self._tables: dict[str, list[list[int]]] = {}
        self._lengths: dict[str, int] = {}
        self._num_free: dict[tuple[str, int], int] = {}

    def step(self, chunks: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
        """Append each sequence's tokens; returns the logits [tokens, V] of the tokens just given."""
        batch = self._batch(chunks)
        with torch.inference_mode():
            logits = self._model.compute_logits(self._model.forward(batch))
        assert logits.dtype == torch.float32
        parts = logits.split([len(ids) for _, ids in chunks])
        return {name: part for (name, _), part in zip(chunks, parts, strict=True)}

    def _grow(self, name: str, num_tokens: int) -> None:
        start = self._lengths.get(name, 0)
        self._lengths[name] = start + num_tokens
        tables = self._tables.setdefault(name, [[] for _ in self._layout.groups])
        for number, (table, window) in enumerate(zip(tables, self._layout.windows, strict=True)):
            while len(table) * BLOCK_SIZE < self._lengths[name]:
                table.append(self._free.pop(0))
            if window is not None:
                first = max(0, start - window + 1) // BLOCK_SIZE
                self._free += table[self._num_free.get((name, number), 0) : first]  # the table names them still
                self._num_free[name, number] = first

    def _batch(self, chunks: Sequence[tuple[str, Sequence[int]]]) -> ForwardBatch:
        ids, positions, ends, lengths = [], [], [0], []
        slots: list[list[int]] = [[] for _ in self._layout.groups]
        for name, tokens in chunks:
            start = self._lengths.get(name, 0)
            self._grow(name, len(tokens))
            places = range(start, start + len(tokens))
            positions += places
            for group, table in zip(slots, self._tables[name], strict=True):
                group += [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]
            ids.extend(tokens)
            ends.append(len(ids))
            lengths.append(self._lengths[name])
        width = max(len(self._tables[name][0]) for name, _ in chunks)
        tables = [[self._tables[name][group] for name, _ in chunks] for group in range(len(slots))]
        return ForwardBatch(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            cu_seqlens_q=torch.tensor(ends, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.tensor(
                [[row + row[-1:] * (width - len(row)) for row in rows] for rows in tables], dtype=torch.int32
            ),
            max_query_len=max(len(tokens) for _, tokens in chunks),
            max_seq_len=max(lengths),
            kv_caches=self._caches,
        )


@pytest.fixture
def paged_run() -> type[PagedRun]:
    return PagedRun
