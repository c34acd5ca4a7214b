"""The steps that are measured on a GPU, run on the CPU: they must be valid, and as large as serving's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aserve.runtime.loader import load_model
from aserve.runtime.penalties import state_bytes
from aserve.runtime.profiling import largest_plan, make_runner, smallest_plans
from aserve_kernels import load


@pytest.mark.parametrize(
    ("max_num_seqs", "max_batch_tokens", "max_length", "block_size"),
    [
        (1, 64, 64, 16),
        (1, 100, 64, 16),
        (8, 64, 512, 16),
        (100, 12, 512, 16),
        (5, 13, 2, 1),
        (3, 1, 512, 16),
        (2, 9, 1, 4),
    ],
)
def test_plans_run(
    tiny_folder: Path, max_num_seqs: int, max_batch_tokens: int, max_length: int, block_size: int
) -> None:
    model = load_model(tiny_folder, dtype=torch.float32, device=torch.device("cpu"), kernels=load("cpu"))
    plan = largest_plan(
        max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, max_length=max_length, block_size=block_size
    )
    assert len(plan.sequences) == min(max_num_seqs, max_batch_tokens)
    runner = make_runner(model, plan, max_num_seqs=max_num_seqs, max_length=max_length, block_size=block_size)
    result = runner.launch(plan).result()
    assert len(result.sampled) == len(result.logprobs) == len(plan.sequences)
    measured = state_bytes(len(plan.sequences), vocab_size=260, max_length=0)
    assert measured <= runner.penalty_bytes
    for small in smallest_plans(min(2, max_batch_tokens, max_length), block_size):
        assert len(runner.launch(small).result().sampled) == 1
