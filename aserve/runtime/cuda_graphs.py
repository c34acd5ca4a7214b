"""Steps as CUDA graphs: captured once per shape, replayed with one launch instead of hundreds.

A decode step of a 28-layer model is about 300 kernels, which Python launches in 16 to 20 ms; the GPU needs 4 to 10. A
graph holds everything from token ids to logits, attention included, for a number of tokens and of sequences that are
rounded up; the places that a step leaves unused belong to sequences of no length, which write nothing. Steps too large
for any graph run as they are: their kernels take longer than their launches.

Knows models and batches, and neither plans nor sampling. Owned by the model runner, on the step thread.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aserve.layers.batch import ForwardBatch
from aserve.models.model import Model
from aserve.planning.step_shapes import StepShape


class ShapeTable:
    """Finds the smallest shape that holds a step."""

    def __init__(self, shapes: list[StepShape]) -> None:
        self._decodes = sorted(shape.num_seqs for shape in shapes if not shape.prefill)
        self._prefill_tokens = sorted({shape.num_tokens for shape in shapes if shape.prefill})
        self._prefill_seqs = {
            n: sorted(s.num_seqs for s in shapes if s.prefill and s.num_tokens == n) for n in self._prefill_tokens
        }

    def find(self, *, num_tokens: int, num_seqs: int) -> StepShape | None:
        """Return the shape for a step with this many tokens in all; None if it is too large for any."""
        if num_tokens == num_seqs:
            size = _at_least(self._decodes, num_seqs)
            return None if size is None else StepShape(False, size, size)
        tokens = _at_least(self._prefill_tokens, num_tokens)
        seqs = None if tokens is None else _at_least(self._prefill_seqs[tokens], num_seqs)
        return None if tokens is None or seqs is None else StepShape(True, tokens, seqs)


def _at_least(sizes: list[int], size: int) -> int | None:
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


class StaticBatch:
    """The tensors that graphs read, at addresses that do not change; each step is written into their beginnings."""

    def __init__(self, example: ForwardBatch, *, max_num_tokens: int, max_num_seqs: int, table_width: int) -> None:
        """``example`` is any batch of the model: it says how many groups there are, and where the caches lie."""
        device = example.input_ids.device
        groups = example.block_tables.shape[:-2]
        self._ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((*groups, max_num_tokens), -1, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._tables = torch.zeros((*groups, max_num_seqs, table_width), dtype=torch.int32, device=device)
        self._one_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._bounds = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._example = example

    def view(self, shape: StepShape) -> tuple[ForwardBatch, Tensor | None]:
        """Return the batch that a graph of this shape reads, and which hidden states the head takes (None: all)."""
        tokens, seqs = shape.num_tokens, shape.num_seqs
        batch = replace(
            self._example,
            input_ids=self._ids[:tokens],
            positions=self._positions[:tokens],
            slot_mapping=self._slot_mapping[..., :tokens],
            cu_seqlens_q=(self._bounds if shape.prefill else self._one_each)[: seqs + 1],
            seq_lens=self._seq_lens[:seqs],
            block_tables=self._tables[..., :seqs, :],
            max_query_len=tokens if shape.prefill else 1,
            max_seq_len=self._tables.shape[-1] * self._example.kv_caches[0][0].shape[1],
        )
        return batch, self._last_tokens[:seqs] if shape.prefill else None

    def write(self, shape: StepShape, batch: ForwardBatch, last_tokens: Tensor | None) -> None:
        """Copy a step in. Places beyond it get no length and no cache row, and tokens that exist."""
        tokens, (seqs, width) = len(batch.input_ids), batch.block_tables.shape[-2:]
        self._ids[:tokens].copy_(batch.input_ids, non_blocking=True)
        self._positions[:tokens].copy_(batch.positions, non_blocking=True)
        self._slot_mapping[..., :tokens].copy_(batch.slot_mapping, non_blocking=True)
        self._seq_lens[:seqs].copy_(batch.seq_lens, non_blocking=True)
        self._tables[..., :seqs, :width].copy_(batch.block_tables, non_blocking=True)
        if tokens < shape.num_tokens:
            self._slot_mapping[..., tokens : shape.num_tokens].fill_(-1)
        if seqs < shape.num_seqs:
            self._seq_lens[seqs : shape.num_seqs].zero_()
        if shape.prefill:
            assert last_tokens is not None
            self._bounds[: seqs + 1].copy_(batch.cu_seqlens_q, non_blocking=True)
            self._bounds[seqs + 1 : shape.num_seqs + 1].fill_(tokens)
            self._last_tokens[: len(last_tokens)].copy_(last_tokens, non_blocking=True)
            # those of a larger step would lie beyond this one's hidden states
            self._last_tokens[len(last_tokens) : shape.num_seqs].zero_()


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class StepGraphs:
    """The graphs of one model over one KV cache."""

    def __init__(self, model: Model, static: StaticBatch, shapes: list[StepShape]) -> None:
        self._model = model
        self._static = static
        self._shapes = shapes
        self._table = ShapeTable(shapes)
        self._captured: dict[StepShape, _Captured] = {}

    def capture_all(self) -> None:
        """Capture every shape, on a stream of its own; must be called before the first step that counts.

        Graphs share one pool of memory: since they never run at the same time, each may use again what the others use
        between their first kernel and their last. So the logits of a step are only good until the next.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        pool: Any = None
        with torch.cuda.stream(stream):
            for shape in self._shapes:
                self._compute(shape)  # compiles and loads what the capture must find ready
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                # not torch.cuda.graph(), which collects garbage before each capture: 0.1 s times the number of shapes
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                logits = self._compute(shape)
                graph.capture_end()
                pool = graph.pool()
                self._captured[shape] = _Captured(graph, alias(logits))
                del logits
        torch.cuda.current_stream().wait_stream(stream)

    def run(self, batch: ForwardBatch, last_tokens: Tensor | None) -> Tensor | None:
        """Queue a step; its logits [S', V] float32 are good until the next one. None if there is no graph for it.

        ``last_tokens`` [S'] are the rows of the hidden states that the head takes; None: all, one per sequence.
        """
        shape = self._table.find(num_tokens=len(batch.input_ids), num_seqs=batch.block_tables.shape[-2])
        captured = None if shape is None else self._captured.get(shape)
        if shape is None or captured is None:
            return None
        self._static.write(shape, batch, last_tokens)
        captured.graph.replay()
        if shape.prefill and last_tokens is not None:
            return captured.logits[: len(last_tokens)]
        logits = captured.logits[: len(batch.seq_lens)]
        return logits if last_tokens is None else logits.index_select(0, last_tokens)

    def _compute(self, shape: StepShape) -> Tensor:
        return compute(self._model, *self._static.view(shape))


def compute(model: Model, batch: ForwardBatch, last_tokens: Tensor | None) -> Tensor:
    """Return the logits [S', V] float32 of a batch."""
    hidden = model.forward(batch)
    return model.compute_logits(hidden if last_tokens is None else hidden.index_select(0, last_tokens))


class _Memory:
    """Describes a tensor's memory without holding it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def alias(logits: Tensor) -> Tensor:
    """Return a view of ``logits`` float32, contiguous, that does not keep its memory from being used again."""
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    return torch.as_tensor(_Memory(logits), device=logits.device)
