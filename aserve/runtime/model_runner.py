"""One step on the device: plan rows to a batch, hidden states, logits, tokens.

The same steps in the same order leave the same state, on any rank. Nothing here waits for the device: ``launch``
queues the work, ``LaunchedStep.result`` reads it. Called by the executor, on the step thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from aserve.core.capacity import Capacity
from aserve.core.logprobs import PackedLogprobs
from aserve.core.request import SamplingParams, TokenLogprobs
from aserve.core.step import NewSequence, ScheduledSequence, StepPlan, StepResult
from aserve.grammar import GrammarCompiler, settle
from aserve.layers.batch import ForwardBatch
from aserve.models.model import Model
from aserve.planning.step_shapes import MAX_PREFILL_TOKENS, step_shapes
from aserve.runtime.cuda_graphs import StaticBatch, StepGraphs, compute
from aserve.runtime.forward_batch import BatchBuilder, PlanColumns
from aserve.runtime.pooler import Pooled, Pooler
from aserve.runtime.sampler import Sampled, SampledLogprobs, Sampler
from aserve.runtime.transfer import to_device, to_host


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose work is queued; tensors are on the host and valid once ``done`` has happened (None: already)."""

    step_id: int
    sampled: Sampled | None
    done: torch.cuda.Event | None
    pooled: Pooled | None = None

    def result(self) -> StepResult:
        """Wait for the step's own work, not for what was queued later, and read it; once."""
        if self.done is not None:
            self.done.synchronize()
        token_ids: tuple[int, ...] = ()
        logprobs: dict[int, TokenLogprobs] = {}
        completed: frozenset[int] = frozenset()
        if self.sampled is not None:
            token_ids = tuple(self.sampled.token_ids.tolist())
            if (bound := self.sampled.constrained) is not None:
                token_ids, completed = settle(token_ids, bound.rows, bound.matchers)
            if self.sampled.logprobs is not None:
                logprobs = _read_logprobs(token_ids, self.sampled.logprobs)
        result = StepResult(self.step_id, token_ids, logprobs, completed=completed)
        return result if self.pooled is None else self.pooled.between(result)


class ModelRunner:
    """A model, its KV cache and the state of all slots."""

    def __init__(
        self,
        model: Model,
        kv_caches: tuple[tuple[Tensor, Tensor], ...],
        capacity: Capacity,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """``grammars``: see ``Sampler``."""
        self._model = model
        self._device = model.ctx.device
        self._graphs: StepGraphs | None = None
        self._batches = BatchBuilder(capacity, kv_caches, self._device)
        self._sampler = Sampler(
            vocab_size=model.spec.vocab_size,
            max_num_seqs=capacity.max_num_seqs,
            max_length=capacity.max_length,
            device=self._device,
            sample=model.ctx.kernels.sample,
            grammars=grammars,
        )
        self._pooler = Pooler(capacity.max_num_seqs, model.spec.hidden_size, self._device)

    @property
    def penalty_bytes(self) -> int:
        """Device memory that the state of penalties takes now; the KV cache leaves room for all of it."""
        return self._sampler.penalty_bytes

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step. On the CPU this computes it."""
        columns = PlanColumns.of(plan)
        batch = self._batches.build(plan, columns)
        self._sampler.observe(plan, columns.slots)
        self._pooler.observe(plan)
        sampled, pooled = None, None
        if self._pooler.is_needed(columns):
            hidden = self._model.forward(batch)
            pooled = self._pooler.pool(hidden, columns)
            columns = columns._replace(sampling=np.delete(columns.sampling, pooled.places))
            if len(columns.sampling):
                sampled = self._sample(partial(self._head, hidden), columns)
        elif len(columns.sampling):
            sampled = self._sample(partial(self._compute, batch), columns)
        else:
            self._compute(batch, torch.empty(0, dtype=torch.int64, device=self._device))
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return LaunchedStep(plan.step_id, sampled, done, pooled)

    @torch.inference_mode()
    def capture_graphs(self, capacity: Capacity) -> None:
        """Capture the steps of all shapes that gain from it. CUDA only; the slots must be free."""
        new = NewSequence(SamplingParams(max_tokens=1), 1, ())
        plan = StepPlan(0, (ScheduledSequence("", 0, 0, (0,), ((0,),) * len(capacity.windows), True, new),))
        static = StaticBatch(
            self._batches.build(plan, PlanColumns.of(plan)),
            max_num_tokens=min(capacity.max_batch_tokens, max(MAX_PREFILL_TOKENS, capacity.max_num_seqs)),
            max_num_seqs=capacity.max_num_seqs,
            table_width=capacity.table_width,
        )
        shapes = step_shapes(max_num_seqs=capacity.max_num_seqs, max_batch_tokens=capacity.max_batch_tokens)
        self._graphs = StepGraphs(self._model, static, shapes)
        self._graphs.capture_all()

    def _compute(self, batch: ForwardBatch, last_tokens: Tensor | None) -> Tensor:
        """Queue the step, as a graph where there is one; returns the logits of ``last_tokens`` (None: of all)."""
        logits = None if self._graphs is None else self._graphs.run(batch, last_tokens)
        return compute(self._model, batch, last_tokens) if logits is None else logits

    def _head(self, hidden: Tensor, last_tokens: Tensor | None) -> Tensor:
        return self._model.compute_logits(hidden if last_tokens is None else hidden.index_select(0, last_tokens))

    def _sample(self, compute: Callable[[Tensor | None], Tensor], columns: PlanColumns) -> Sampled:
        """Sample the rows of ``columns.sampling``; ``compute`` returns logits of hidden states (None: of all)."""
        rows = columns.sampling
        slots = columns.slots[rows]
        ends = np.cumsum(columns.lengths)
        sent_slots, last_tokens = to_device((slots, ends[rows] - 1), self._device)
        # where every row is a decode, all hidden states go through the head
        logits = compute(last_tokens if len(rows) < ends[-1] else None)
        sampled = self._sampler.sample(logits, slots, (columns.starts + columns.lengths)[rows])
        self._batches.remember(sent_slots, sampled.token_ids)
        return _to_host(sampled)


def _to_host(sampled: Sampled) -> Sampled:
    logprobs = sampled.logprobs
    if logprobs is not None:
        logprobs = logprobs._replace(
            chosen=to_host(logprobs.chosen),
            top_ids=to_host(logprobs.top_ids),
            top_values=to_host(logprobs.top_values),
        )
    return Sampled(to_host(sampled.token_ids), logprobs, sampled.constrained)


def _read_logprobs(token_ids: tuple[int, ...], logprobs: SampledLogprobs) -> dict[int, TokenLogprobs]:
    """Return the entries by index into ``token_ids``; none for rows that failed.

    Alternatives of probability 0 (tokens held back by min_tokens) are left out: JSON cannot carry their -inf.
    """
    columns = zip(
        logprobs.rows.tolist(),
        logprobs.num_top.tolist(),
        logprobs.chosen.tolist(),
        logprobs.top_ids.tolist(),
        logprobs.top_values.tolist(),
        strict=True,
    )
    entries: dict[int, TokenLogprobs] = {}
    for row, num_top, chosen, top_ids, top_values in columns:
        if token_ids[row] < 0:
            continue
        asked = top_values[:num_top]
        num_possible = num_top - asked.count(-np.inf)  # sorted, so those of probability 0 are last
        top = PackedLogprobs(top_ids[:num_possible], asked[:num_possible])
        entries[row] = TokenLogprobs(token_ids[row], chosen, top)
    return entries
