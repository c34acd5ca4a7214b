"""The executor on a GPU: the CPU's tokens, and a ``submit`` that never waits for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aserve.core.errors import ConfigError
from aserve.core.request import Request, SamplingParams
from aserve.core.step import StepPlan
from aserve.runtime.executor import LocalExecutor

pytestmark = pytest.mark.gpu

KINDS = [
    SamplingParams(max_tokens=20, temperature=0),
    SamplingParams(max_tokens=20, temperature=1.0, seed=1),
    SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, top_k=40, seed=2, presence_penalty=0.5),
    SamplingParams(max_tokens=20, temperature=1.5, min_p=0.05, seed=3, frequency_penalty=1.0),
    SamplingParams(max_tokens=20, temperature=0, repetition_penalty=1.3, num_logprobs=3),
    SamplingParams(max_tokens=20, temperature=0.9, seed=4, min_tokens=10, logit_bias=((65, 2.0),),
                   stop_token_ids=tuple(range(60, 120))),
]  # fmt: skip
LAYOUTS = {
    "roomy": {"kv_cache_tokens": 2048},
    "chunked": {"kv_cache_tokens": 2048, "max_batch_tokens": 7},
    "preempted": {"kv_cache_tokens": 160, "block_size": 8},
}


class NoWaiting:
    """Passes everything on; a wait for the device inside ``submit`` is an error."""

    def __init__(self, executor: LocalExecutor) -> None:
        self._executor = executor
        self.capacity = executor.capacity

    def submit(self, plan: StepPlan) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._executor.submit(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def wait(self) -> Any:
        return self._executor.wait()

    def close(self) -> None:
        self._executor.close()


def make_requests() -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 256, length).tolist()) for length in (1, 2, 15, 16, 17, 50) * 2]
    return [
        Request(request_id=f"r{i}", prompt_token_ids=p, sampling=KINDS[i % len(KINDS)], arrival_index=i)
        for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize(("kernels", "graphs"), [("triton", True), ("triton", False), ("reference", True)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_the_cpu(
    make_executor: Any, drive: Any, layout: str, depth: int, kernels: str, graphs: bool
) -> None:
    """With CUDA graphs, without, and with kernels that cannot be captured, so that the setting has no effect."""
    expected = drive(make_executor(), make_requests())
    executor: Any = make_executor(
        device="cuda", kernels=kernels, cuda_graphs=graphs, max_in_flight=depth, **LAYOUTS[layout]
    )
    if kernels == "triton":  # the reference reads lengths back, layer by layer
        executor = NoWaiting(executor)
    run = drive(executor, make_requests())
    assert run.token_ids == expected.token_ids
    assert (run.num_preemptions > 0) == (layout == "preempted")
    for answer, want in zip(run.answers, expected.answers, strict=True):
        for a, b in zip(answer.logprobs, want.logprobs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_a_small_step_after_a_large_one(make_executor: Any, drive: Any) -> None:
    """Rows that the large step sampled lie beyond the small one's, whose graph reads the same tensors."""
    prompts = [tuple(range(40)), tuple(range(1, 41)), tuple(range(2, 42)), (5, 6, 7)]
    requests = [
        Request(request_id=f"r{i}", prompt_token_ids=p, sampling=KINDS[0], arrival_index=i)
        for i, p in enumerate(prompts)
    ]
    settings = {"kv_cache_tokens": 2048, "max_batch_tokens": 120}
    expected = drive(make_executor(**settings), requests)
    run = drive(make_executor(device="cuda", **settings), requests)
    assert run.token_ids == expected.token_ids


def test_default_size_leaves_a_tenth_of_the_device(make_executor: Any) -> None:
    executor = make_executor(device="cuda")
    assert executor.capacity.max_in_flight == 2
    free, total = torch.cuda.mem_get_info()
    assert 0.05 * total < free < 0.15 * total
    executor.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_memory_fraction": 0.0001}, "no memory is left for a KV cache of.*set --gpu-memory-fraction 0"),
        ({"kv_cache_memory": "9999GiB"}, "are available: weights take .*; set --kv-cache-memory"),
    ],
)
def test_too_little_memory(make_executor: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_executor(device="cuda", **settings)
