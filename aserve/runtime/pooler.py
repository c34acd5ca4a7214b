"""From a step's hidden states to the vectors of prompts, kept between the chunks of a prompt in its slot.

A vector is a function of its prompt alone: never of the chunks, the batch, the slot, or of how often the sequence was
preempted (a slot starts afresh with each admission). All arithmetic is float32. Does not know the model or the KV
cache. Called by the model runner, once per step, in step order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.core.pooling import PoolingKind, PoolingParams
from aserve.core.step import INVALID_TOKEN, POOLED, StepPlan, StepResult
from aserve.runtime.forward_batch import PlanColumns
from aserve.runtime.transfer import to_device, to_host

_LEAST_NORM = 1e-12  # as torch.nn.functional.normalize has it


@dataclass(frozen=True, slots=True)
class Pooled:
    """The vectors that a step completes; tensors are on the host and valid once the step is done.

    Attributes:
        places: [R] where each stands among the rows of the step that have a result.
        vectors: [R, H] float32.
        sizes: how many leading numbers each has.
        valid: [R] bool, whether all of them are finite.
    """

    places: NDArray[np.int64]
    vectors: Tensor
    sizes: list[int]
    valid: Tensor

    def between(self, result: StepResult) -> StepResult:
        """Put the vectors where they belong among the tokens of the rows that sample."""
        places = self.places.tolist()
        ids = list(result.sampled)
        kept = np.delete(np.arange(len(ids) + len(places)), places).tolist()
        vectors: dict[int, bytes] = {}
        rows = zip(places, self.valid.tolist(), self.vectors.numpy().astype("<f4"), self.sizes, strict=True)
        for place, valid, vector, size in rows:  # ascending, so that each lands where it belongs
            ids.insert(place, POOLED if valid else INVALID_TOKEN)
            if valid:
                vectors[place] = vector[:size].tobytes()
        logprobs = {kept[index]: entry for index, entry in result.logprobs.items()}
        completed = frozenset([kept[index] for index in result.completed])
        return StepResult(result.step_id, tuple(ids), logprobs, vectors, completed)


class Pooler:
    """What every slot's prompt is pooled by, and the sums so far. Used by one thread, in step order."""

    def __init__(self, max_num_seqs: int, size: int, device: torch.device) -> None:
        self._params: list[PoolingParams | None] = [None] * max_num_seqs
        self._is_pooling = np.zeros(max_num_seqs, np.bool_)
        self._size = size
        self._device = device
        self._sums: Tensor | None = None  # [slots, H] float32, from the first prompt that needs them on

    def observe(self, plan: StepPlan) -> None:
        """Take in the plan's new sequences. Must be called once per plan."""
        for row in plan.sequences:
            if row.new is not None:
                self._params[row.slot] = row.new.pooling
                self._is_pooling[row.slot] = row.new.pooling is not None

    def second_starts(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the second text of each slot's pair begins; 0 where there is none."""
        return np.array([self._known(slot).second_start for slot in slots.tolist()], np.int64)

    def is_needed(self, columns: PlanColumns) -> bool:
        """Whether a row of the step belongs to a prompt that is pooled."""
        return bool(self._is_pooling[columns.slots].any())

    def pool(self, hidden: Tensor, columns: PlanColumns) -> Pooled:
        """Take in the hidden states [T, H] of a step; returns the vectors of the prompts that it completes."""
        slots, starts, lengths, sampling = columns
        self._add(hidden, columns)
        places = np.flatnonzero(self._is_pooling[slots[sampling]])
        rows = sampling[places]
        params = [self._known(slot) for slot in slots[rows].tolist()]
        ends = np.cumsum(lengths)[rows]
        num_tokens = (starts + lengths)[rows]
        sizes = [p.dimensions or self._size for p in params]
        is_summed = np.array([p.kind is not PoolingKind.LAST for p in params], np.bool_)
        divisors = np.array(
            [n if p.kind is PoolingKind.MEAN else 1 for p, n in zip(params, num_tokens, strict=True)], np.float32
        )
        is_normal = np.array([p.normalize for p in params], np.bool_)
        sent = to_device((ends - 1, slots[rows], is_summed, divisors, is_normal, np.array(sizes)), self._device)
        vectors = hidden.index_select(0, sent[0]).float()
        if self._sums is not None:
            vectors = torch.where(sent[2][:, None], self._sums[sent[1]] / sent[3][:, None], vectors)
        return _finished(places, vectors, sizes, is_normal=sent[4], sent_sizes=sent[5])

    def _known(self, slot: int) -> PoolingParams:
        params = self._params[slot]
        assert params is not None, "the slot belongs to a prompt that is pooled"
        return params

    def _add(self, hidden: Tensor, columns: PlanColumns) -> None:
        """Add the states that a vector is made of, other than the last, to the sums of their slots."""
        kinds = [getattr(self._params[slot], "kind", None) for slot in columns.slots.tolist()]
        means = np.array([kind is PoolingKind.MEAN for kind in kinds], np.bool_)
        firsts = np.array([kind is PoolingKind.FIRST for kind in kinds], np.bool_) & (columns.starts == 0)
        rows = np.flatnonzero(means | firsts)
        if not len(rows):
            return
        if self._sums is None:
            self._sums = torch.zeros(len(self._params), self._size, dtype=torch.float32, device=self._device)
        begins = np.cumsum(columns.lengths) - columns.lengths
        counts = np.where(means, columns.lengths, 1)[rows]
        tokens = np.arange(counts.sum()) + np.repeat(begins[rows] - (np.cumsum(counts) - counts), counts)
        kept = (columns.starts[rows] > 0).astype(np.float32)  # a first chunk forgets what the slot held
        slots, sent_tokens, sent_counts, sent_kept = to_device(
            (columns.slots[rows], tokens, counts, kept), self._device
        )
        states = hidden.index_select(0, sent_tokens).float()
        sums = torch.segment_reduce(states, "sum", lengths=sent_counts, axis=0, unsafe=True)
        before = torch.where(sent_kept[:, None] > 0, self._sums[slots], 0.0)  # not times 0: it may be NaN
        self._sums[slots] = before + sums


def _finished(
    places: NDArray[np.int64], vectors: Tensor, sizes: list[int], *, is_normal: Tensor, sent_sizes: Tensor
) -> Pooled:
    """Cut and normalise vectors [R, H], and queue their copy to the host."""
    width = vectors.shape[1]
    if any(size < width for size in sizes):
        beyond = torch.arange(width, device=vectors.device)[None, :] >= sent_sizes[:, None]
        vectors = vectors.masked_fill(beyond, 0.0)
    norms = vectors.norm(dim=1, keepdim=True)
    vectors = torch.where(is_normal[:, None], vectors / norms.clamp_min(_LEAST_NORM), vectors)
    return Pooled(places, to_host(vectors), sizes, to_host(norms.isfinite().squeeze(1)))
