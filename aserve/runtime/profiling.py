"""Measures how much device memory one largest step takes beside weights and KV. CUDA only.

Runs a step of ``max_batch_tokens`` tokens in which as many sequences as possible sample, with a KV cache of its own
that is dropped again. Also compiles the kernels, so the first request does not pay for that. Called once, before the
KV cache is sized.
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


def largest_plan(*, max_num_seqs: int, max_batch_tokens: int, max_length: int, block_size: int) -> StepPlan:
    """Return a step that fills the token budget with as many sampling sequences as possible, of random sampling."""
    num_seqs = min(max_num_seqs, max_batch_tokens)
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, num_logprobs=20)
    rows: list[ScheduledSequence] = []
    next_block = 0
    for i in range(num_seqs):
        share = max_batch_tokens // num_seqs + (i < max_batch_tokens % num_seqs)
        length = min(share, max_length)
        blocks = tuple(range(next_block, next_block - (-length // block_size)))
        next_block += len(blocks)
        new = NewSequence(sampling, length, ())
        rows.append(ScheduledSequence(f"profile-{i}", i, 0, (0,) * length, blocks, True, new))
    return StepPlan(0, tuple(rows))


def measure_gpu(
    model: Model, *, max_num_seqs: int, max_batch_tokens: int, max_length: int, block_size: int
) -> GpuMemory:
    """Return what one device holds. Raises torch.OutOfMemoryError when not even the step fits."""
    device, spec, dtype = model.ctx.device, model.spec, model.ctx.dtype
    plan = largest_plan(
        max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, max_length=max_length, block_size=block_size
    )
    num_blocks = sum(len(row.new_block_ids) for row in plan.sequences)
    gc.collect()
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    capacity = Capacity(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens,
        max_model_len=max_length,
    )  # fmt: skip
    caches = allocate(spec, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    ModelRunner(model, caches, capacity).launch(plan).result()
    activations = torch.cuda.max_memory_allocated(device) - before
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)  # other processes, the CUDA context, loaded kernels
    del caches
    gc.collect()
    torch.cuda.empty_cache()
    return GpuMemory(total=total, others=max(0, others), weights=weights, activations=activations)
