"""One step of an encoder: whole inputs to hidden states to vectors or scores.

No state but the parameters of each slot: an input comes in one row, so nothing has to be kept for the next step. Called
by the executor, on the step thread.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aserve.core.step import StepPlan
from aserve.layers.encoder_batch import EncoderBatch, PaddedGroup
from aserve.models.bert import Bert
from aserve.runtime.forward_batch import Ints, PlanColumns
from aserve.runtime.model_runner import LaunchedStep
from aserve.runtime.pooler import Pooled, Pooler
from aserve.runtime.transfer import to_device, to_host

_SHORTEST = 16
"""Inputs of up to so many tokens are padded to the longest among them; longer ones in classes of doubled length."""


class EncoderRunner:
    """An encoder and the parameters of all slots."""

    def __init__(self, model: Bert, max_num_seqs: int) -> None:
        self._model = model
        self._device = model.ctx.device
        self._pooler = Pooler(max_num_seqs, model.spec.hidden_size, self._device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step. On the CPU this computes it."""
        columns = PlanColumns.of(plan)
        self._pooler.observe(plan)
        hidden = self._model.forward(self._build(plan, columns))
        pooled = self._classify(hidden, columns) if self._model.spec.num_labels else self._pooler.pool(hidden, columns)
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return LaunchedStep(plan.step_id, None, done, pooled)

    def _classify(self, hidden: torch.Tensor, columns: PlanColumns) -> Pooled:
        firsts = np.cumsum(columns.lengths) - columns.lengths
        (index,) = to_device((firsts,), self._device)
        scores = self._model.classify(hidden.index_select(0, index))
        valid = scores.isfinite().all(dim=1)
        return Pooled(np.arange(len(firsts)), to_host(scores), [scores.shape[1]] * len(firsts), to_host(valid))

    def _build(self, plan: StepPlan, columns: PlanColumns) -> EncoderBatch:
        lengths = columns.lengths
        begins = np.cumsum(lengths) - lengths
        num_tokens = int(lengths.sum())
        ids = np.fromiter(chain.from_iterable(row.token_ids for row in plan.sequences), np.int64, num_tokens)
        positions = np.arange(num_tokens) - np.repeat(begins, lengths)
        seconds = np.repeat(self._pooler.second_starts(columns.slots), lengths)
        types = ((seconds > 0) & (positions >= seconds)).astype(np.int64)
        groups = padded_groups(begins, lengths)
        arrays: list[NDArray[Any]] = [ids, positions, types, *chain.from_iterable(groups)]
        sent = to_device(arrays, self._device)
        padded: list[PaddedGroup] = []
        for number in range(len(groups)):
            tokens, mask, kept, places = sent[3 + 4 * number : 7 + 4 * number]
            padded.append(PaddedGroup(tokens, mask if len(kept) < tokens.numel() else None, kept, places))
        return EncoderBatch(sent[0], sent[1], sent[2], tuple(padded))


def padded_groups(begins: Ints, lengths: Ints) -> list[tuple[NDArray[Any], ...]]:
    """Return tokens, mask, kept and places of each ``PaddedGroup``, for inputs that begin at ``begins`` [S].

    Attention costs the square of the padded length, so inputs are only padded with others of less than twice theirs.
    """
    classes = np.maximum(0, np.ceil(np.log2(lengths / _SHORTEST))).astype(np.int64)
    groups: list[tuple[NDArray[Any], ...]] = []
    for number in np.unique(classes):
        rows = np.flatnonzero(classes == number)
        own = lengths[rows]
        steps = np.arange(own.max())
        is_real = steps[None, :] < own[:, None]
        tokens = begins[rows][:, None] + np.where(is_real, steps[None, :], 0)
        groups.append((tokens, is_real[:, None, None, :].copy(), np.flatnonzero(is_real), tokens[is_real]))
    return groups
