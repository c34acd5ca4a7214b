"""The steps that are measured on a GPU, run on the CPU: they must be valid, and as large as serving's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aserve.planning.activations import penalty_state_bytes
from aserve.planning.limits import Limits
from aserve.runtime import profiling
from aserve.runtime.loader import load_model
from aserve.runtime.profiling import largest_plan, make_runner, smallest_plans, unmeasured_table_bytes
from aserve_kernels import load


@pytest.mark.parametrize(
    ("max_num_seqs", "max_batch_tokens", "max_length", "block_size"),
    [
        (1, 64, 64, 16),
        (1, 100, 64, 16),
        (8, 64, 512, 16),
        (8, 64, 9, 16),
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
    limits = Limits(
        max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, max_in_flight=1, max_model_len=max_length
    )
    plan = largest_plan(limits, block_size=block_size)
    num_seqs = min(max_num_seqs, max_batch_tokens)
    assert len(plan.sequences) == num_seqs
    assert plan.num_tokens == min(max_batch_tokens, num_seqs * max_length)
    assert {row.start + len(row.token_ids) for row in plan.sequences} == {max_length}  # the longest that may be
    runner = make_runner(model, limits, block_size=block_size)
    result = runner.launch(plan).result()
    assert len(result.sampled) == num_seqs
    assert len(result.logprobs) == max(1, num_seqs - 1)  # the last of several is greedy, and asks for nothing
    assert runner.penalty_bytes >= penalty_state_bytes(1, vocab_size=260, max_length=0)
    for small in smallest_plans(limits, block_size=block_size):
        assert len(runner.launch(small).result().sampled) == 1


def test_tables_of_longer_contexts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(max_num_seqs=3, max_batch_tokens=64, max_in_flight=1, max_model_len=1000)
    assert unmeasured_table_bytes(limits, block_size=16, num_groups=2) == 0
    monkeypatch.setattr(profiling, "LONGEST_CONTEXT", 100)
    assert unmeasured_table_bytes(limits, block_size=16, num_groups=2) == 4 * 3 * 2 * (63 - 7)
    rows = largest_plan(limits, block_size=16, num_groups=2).sequences
    assert {(row.start + len(row.token_ids), len(row.new_block_ids), len(row.new_block_ids[1])) for row in rows} == {
        (100, 2, 7)
    }
