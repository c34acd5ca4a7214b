"""Measures how much device memory one largest step takes beside weights and KV. CUDA only.

Runs a step of ``max_batch_tokens`` tokens in which as many sequences as possible sample, all of them at the end of a
long context, with a KV cache of its own that is dropped again, and adds what penalties come to when every slot uses
them. Also compiles every variant of the kernels, so no request waits for that. Called once, before the KV cache is
sized; ``planning.activations`` knows without a device what comes out.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import torch

from aserve.core.capacity import Capacity
from aserve.core.kv_layout import KVLayout
from aserve.core.request import SamplingParams
from aserve.core.step import NewSequence, ScheduledSequence, StepPlan
from aserve.models.model import Model
from aserve.planning.activations import PENALTY_SCRATCH_BYTES, penalty_state_bytes
from aserve.planning.limits import Limits
from aserve.runtime.kv_cache import allocate
from aserve.runtime.model_runner import ModelRunner

LONGEST_CONTEXT = 32768
"""Longest context of the measured step: more would only take longer, for block tables that are counted anyway."""

_EVERYTHING = SamplingParams(
    max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, num_logprobs=20, repetition_penalty=1.1,
    presence_penalty=0.1, frequency_penalty=0.1,
)  # fmt: skip
_NO_PENALTIES = replace(_EVERYTHING, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes of one device: its whole memory, what others use of it, and this process's weights and step peak."""

    total: int
    others: int
    weights: int
    activations: int


def largest_plan(limits: Limits, *, block_size: int, num_groups: int = 1) -> StepPlan:
    """Return a step that fills the token budget with as many sampling sequences as possible.

    The first rows are prompt chunks at the end of the context, the others decodes there. The last one is greedy: rows
    that ask for different things are what makes sampling copy logits. Every table repeats block 0, so the step
    needs no memory for the context that it pretends to have.
    """
    num_seqs = min(limits.max_num_seqs, limits.max_batch_tokens)
    context = min(limits.max_model_len, LONGEST_CONTEXT)
    spare = limits.max_batch_tokens - num_seqs
    rows: list[ScheduledSequence] = []
    for i in range(num_seqs):
        added = min(spare, context - 1)
        spare -= added
        start = context - 1 - added
        sampling = _EVERYTHING if i == 0 else _GREEDY if i == num_seqs - 1 else _NO_PENALTIES
        new = NewSequence(sampling, context, (0,) * start if i == 0 else ())
        blocks = ((0,) * -(-context // block_size),) * num_groups
        rows.append(ScheduledSequence(f"profile-{i}", i, start, (0,) * (1 + added), blocks, True, new))
    return StepPlan(0, tuple(rows))


def smallest_plans(limits: Limits, *, block_size: int, num_groups: int = 1) -> tuple[StepPlan, ...]:
    """Return steps of one sequence: a prompt of one token, which is what decodes are, and one of two if that may be.

    The largest step may consist of decodes or of a single prompt, and so leave one of the attention kernels out.
    """
    longest = min(2, limits.max_batch_tokens, limits.max_model_len)
    return tuple(
        largest_plan(
            replace(limits, max_num_seqs=1, max_batch_tokens=n, max_model_len=n),
            block_size=block_size,
            num_groups=num_groups,
        )
        for n in (1, longest)
    )


def make_runner(model: Model, limits: Limits, *, block_size: int) -> ModelRunner:
    """Return a runner for these plans: slots and tables as for serving, over a cache of one block."""
    windows = KVLayout.of(model.spec.sliding_windows).windows
    context = min(limits.max_model_len, LONGEST_CONTEXT) + 1  # the sampled token has a place, too
    capacity = Capacity(
        num_blocks=len(windows) * -(-context // block_size), block_size=block_size, max_num_seqs=limits.max_num_seqs,
        max_batch_tokens=limits.max_batch_tokens, max_model_len=context, windows=windows,
    )  # fmt: skip
    caches = allocate(model.spec, num_blocks=1, block_size=block_size, dtype=model.ctx.dtype, device=model.ctx.device)
    return ModelRunner(model, caches, capacity)


def measure_gpu(model: Model, limits: Limits, *, block_size: int) -> Measured:
    """Return what one device holds. Raises torch.OutOfMemoryError when not even the step fits."""
    device, spec = model.ctx.device, model.spec
    num_groups = len(KVLayout.of(spec.sliding_windows).groups)
    plan = largest_plan(limits, block_size=block_size, num_groups=num_groups)
    gc.collect()
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    runner = make_runner(model, limits, block_size=block_size)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.launch(plan).result()
    activations = torch.cuda.max_memory_allocated(device) - before - runner.penalty_bytes
    activations += PENALTY_SCRATCH_BYTES
    activations += penalty_state_bytes(limits.max_num_seqs, vocab_size=spec.vocab_size, max_length=limits.max_model_len)
    activations += unmeasured_table_bytes(limits, block_size=block_size, num_groups=num_groups)
    for small in smallest_plans(limits, block_size=block_size, num_groups=num_groups):
        runner.launch(small).result()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)  # other processes, the CUDA context, loaded kernels
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return Measured(total=total, others=max(0, others), weights=weights, activations=activations)


def unmeasured_table_bytes(limits: Limits, *, block_size: int, num_groups: int) -> int:
    """Return by how much block tables of the whole context are larger than those of the measured step."""
    num_seqs = min(limits.max_num_seqs, limits.max_batch_tokens)
    measured = -(-min(limits.max_model_len, LONGEST_CONTEXT) // block_size)
    return 4 * num_seqs * num_groups * (-(-limits.max_model_len // block_size) - measured)
