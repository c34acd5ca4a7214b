"""Small random checkpoints of every family, written with transformers, and a paged cache to run aserve's models on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from aserve.core.kv_layout import KVLayout
from aserve.layers.batch import ForwardBatch
from aserve.models.model import Model

BLOCK_SIZE = 4
NUM_BLOCKS = 160

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_untied_biased": {
        "model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7, "tie_word_embeddings": False},
    "qwen2": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "gemma2": {
        "model_type": "gemma2", "sliding_window": 6, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 6, "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}  # fmt: skip


def write_checkpoint(folder: Path, settings: Mapping[str, Any], **options: Any) -> Path:
    """Write a random model; weights are large enough for every part to matter."""
    values = {**SIZES, **settings}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
                if "gemma" in config.model_type:  # they scale by 1 + weight
                    parameter.sub_(1)
            else:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder, **options)
    return folder


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
