"""Measures how much device memory one largest step takes beside weights and KV. CUDA only.

Runs a step of ``max_batch_tokens`` tokens in which as many sequences as possible sample, with a KV cache of its own
that is dropped again, and adds what penalties come to when every slot uses them. Also compiles every variant of the
kernels, so no request waits for that. Called once, before the KV cache is sized.
"""

from __future__ import annotations

import gc

import torch

from aserve.core.capacity import Capacity
from aserve.core.request import SamplingParams
from aserve.core.step import NewSequence, ScheduledSequence, StepPlan
from aserve.models.model import Model
from aserve.runtime.kv_cache import GpuMemory, allocate
from aserve.runtime.model_runner import ModelRunner
from aserve.runtime.penalties import SCRATCH_BYTES, state_bytes

_EVERYTHING = SamplingParams(
    max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, num_logprobs=20, repetition_penalty=1.1,
    presence_penalty=0.1, frequency_penalty=0.1,
)  # fmt: skip


def largest_plan(*, max_num_seqs: int, max_batch_tokens: int, max_length: int, block_size: int) -> StepPlan:
    """Return a step that fills the token budget with as many sampling sequences as possible, each with everything."""
    num_seqs = min(max_num_seqs, max_batch_tokens)
    rows: list[ScheduledSequence] = []
    next_block = 0
    for i in range(num_seqs):
        share = max_batch_tokens // num_seqs + (i < max_batch_tokens % num_seqs)
        length = min(share, max_length)
        blocks = tuple(range(next_block, next_block - (-length // block_size)))
        next_block += len(blocks)
        new = NewSequence(_EVERYTHING, length, ())
        rows.append(ScheduledSequence(f"profile-{i}", i, 0, (0,) * length, (blocks,), True, new))
    return StepPlan(0, tuple(rows))


def smallest_plans(num_tokens: int, block_size: int) -> tuple[StepPlan, ...]:
    """Return steps of one sequence: a prompt of one token, which is what decodes are, and one of ``num_tokens``.

    The largest step may consist of decodes or of a single prompt, and so leave one of the attention kernels out.
    """
    return tuple(
        largest_plan(max_num_seqs=1, max_batch_tokens=n, max_length=n, block_size=block_size) for n in (1, num_tokens)
    )


def make_runner(model: Model, plan: StepPlan, *, max_num_seqs: int, max_length: int, block_size: int) -> ModelRunner:
    """Return a runner with room for the plan and for the tokens it samples."""
    num_blocks = sum(len(blocks) for row in plan.sequences for blocks in row.new_block_ids) + 1
    capacity = Capacity(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, max_batch_tokens=plan.num_tokens,
        max_model_len=max_length + 1,
    )  # fmt: skip
    caches = allocate(
        model.spec, num_blocks=num_blocks, block_size=block_size, dtype=model.ctx.dtype, device=model.ctx.device
    )
    return ModelRunner(model, caches, capacity)


def measure_gpu(
    model: Model, *, max_num_seqs: int, max_batch_tokens: int, max_length: int, block_size: int
) -> GpuMemory:
    """Return what one device holds. Raises torch.OutOfMemoryError when not even the step fits."""
    device, vocab_size = model.ctx.device, model.spec.vocab_size
    plan = largest_plan(
        max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, max_length=max_length, block_size=block_size
    )
    gc.collect()
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    runner = make_runner(model, plan, max_num_seqs=max_num_seqs, max_length=max_length, block_size=block_size)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.launch(plan).result()
    activations = torch.cuda.max_memory_allocated(device) - before - runner.penalty_bytes
    activations += SCRATCH_BYTES + state_bytes(max_num_seqs, vocab_size=vocab_size, max_length=max_length)
    for small in smallest_plans(min(2, max_batch_tokens, max_length), block_size):
        runner.launch(small).result()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)  # other processes, the CUDA context, loaded kernels
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return GpuMemory(total=total, others=max(0, others), weights=weights, activations=activations)
