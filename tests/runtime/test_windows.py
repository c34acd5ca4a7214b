"""Models with sliding windows under the real scheduler: KV groups, blocks that go back early, prefixes, host memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from aserve.core.capacity import Capacity
from aserve.core.request import FinishReason, Request, SamplingParams
from aserve.core.step import INVALID_TOKEN, NO_BLOCK, StepPlan, StepResult
from aserve.runtime.executor import LocalExecutor
from tests.checkpoints import FAMILIES, write_checkpoint

MAX_TOKENS = 16
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, num_logprobs=0)
WINDOWED = ("mistral", "qwen2", "gemma2", "gemma3")
FEW_BLOCKS = {"mistral": 8, "qwen2": 24, "gemma2": 24, "gemma3": 63}
"""Blocks of 4 tokens with which sequences are preempted, by family: each has its number of groups."""
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"depth": 1},
    "chunks of 7": {"depth": 2, "max_batch_tokens": 7},
    "chunks of 16, few blocks": {"depth": 1, "max_batch_tokens": 16, "few_blocks": True},
    "few blocks, no prefix cache": {"depth": 2, "few_blocks": True, "prefix_cache": False},
    "few blocks, host memory": {"depth": 2, "few_blocks": True, "host_cache_memory": "1MiB"},
}


def make_prompts() -> list[tuple[int, ...]]:
    """Ten prompts of 1 to 50 tokens, longer and shorter than the windows; half of them begin alike."""
    rng = np.random.default_rng(0)
    common = tuple(rng.integers(0, 131, 33).tolist())
    prompts: list[tuple[int, ...]] = []
    for i, length in enumerate((1, 6, 15, 17, 50)):
        prompts.append(tuple(rng.integers(0, 131, length).tolist()))
        prompts.append(common + tuple(rng.integers(0, 131, 1 + 2 * i).tolist()))
    return prompts


PROMPTS = make_prompts()


def make_requests(*params: SamplingParams) -> list[Request]:
    return [
        Request(request_id=f"r{i}", prompt_token_ids=p, sampling=params[i % len(params)], arrival_index=i)
        for i, p in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("windowed")
    return {family: write_checkpoint(root / family, FAMILIES[family]) for family in WINDOWED}


class Continuation(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def generated(folders: dict[str, Path]) -> Callable[[str], list[Continuation]]:
    """A function from a family to transformers' greedy continuations of the prompts."""
    known: dict[str, list[Continuation]] = {}

    @torch.inference_mode()
    def generate(family: str) -> list[Continuation]:
        if family not in known:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
            known[family] = [_continue(model, prompt) for prompt in PROMPTS]
        return known[family]

    return generate


def _continue(model: Any, prompt: tuple[int, ...]) -> Continuation:
    output = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logprobs = torch.stack(output.logits)[:, 0].log_softmax(-1).amax(-1)
    return Continuation(output.sequences[0, len(prompt) :].tolist(), logprobs.tolist())


def assert_same(run: Any, wanted: list[Continuation]) -> None:
    for answer, want in zip(run.answers, wanted, strict=True):
        assert answer.token_ids == want.token_ids
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(want.logprobs, rel=1e-4, abs=1e-4)


class Watched:
    """Passes plans on and counts what they ask for."""

    def __init__(self, executor: LocalExecutor) -> None:
        self._executor = executor
        self.num_saves = self.num_restores = self.num_behind = 0

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    def submit(self, plan: StepPlan) -> None:
        self.num_saves += len(plan.saves)
        self.num_restores += len(plan.restores)
        self.num_behind += sum(ids.count(NO_BLOCK) for row in plan.sequences for ids in row.new_block_ids)
        self._executor.submit(plan)

    def wait(self) -> StepResult:
        return self._executor.wait()

    def close(self) -> None:
        self._executor.close()


def build(make_executor: Any, folder: Path, family: str, settings: dict[str, Any], **more: Any) -> Watched:
    settings = {"block_size": 4, "max_num_seqs": 6, "max_in_flight": settings["depth"], **settings, **more}
    few_blocks = settings.pop("few_blocks", False)
    for name in ("depth", "prefix_cache"):
        settings.pop(name, None)
    if few_blocks:
        groups = len(make_executor(folder=folder, block_size=4).capacity.windows)
        settings["kv_cache_tokens"] = FEW_BLOCKS[family] // groups * 4
    return Watched(make_executor(folder=folder, **settings))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", WINDOWED)
def test_greedy_tokens_are_those_of_transformers(
    make_executor: Any,
    drive: Any,
    folders: dict[str, Path],
    generated: Callable[[str], list[Continuation]],
    family: str,
    name: str,
) -> None:
    settings = SETTINGS[name]
    executor = build(make_executor, folders[family], family, settings)
    run = drive(executor, make_requests(GREEDY), prefix_cache=settings.get("prefix_cache", True))
    assert_same(run, generated(family))
    assert "few blocks" in name or not run.num_preemptions
    assert (executor.num_restores > 0) == ("host memory" in name)
    assert executor.num_behind > 0 or "host memory" not in name
    executor.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["chunks of 7", "few blocks, host memory"])
@pytest.mark.parametrize("family", WINDOWED)
def test_greedy_tokens_on_a_gpu(
    make_executor: Any,
    drive: Any,
    folders: dict[str, Path],
    family: str,
    name: str,
) -> None:
    """The tokens are the CPU's. Nothing in ``submit``, copies to and from the host included, waits for the device."""
    expected = drive(build(make_executor, folders[family], family, SETTINGS[name]), make_requests(GREEDY))
    executor = build(make_executor, folders[family], family, SETTINGS[name], device="cuda")
    submit = executor.submit

    def submit_without_waiting(plan: StepPlan) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            submit(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    executor.submit = submit_without_waiting  # type: ignore[method-assign]
    run = drive(executor, make_requests(GREEDY))
    assert run.token_ids == expected.token_ids
    assert (executor.num_restores > 0) == ("host memory" in name)
    executor.close()


VARIED = (
    GREEDY,
    SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=1),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.9, top_k=40, seed=2, presence_penalty=0.5),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0, repetition_penalty=1.3, num_logprobs=2),
)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_everything_at_once_gives_the_tokens_of_isolated_runs(
    make_executor: Any, drive: Any, folders: dict[str, Path], family: str
) -> None:
    """Mixed windows, shared prefixes, host memory, two steps in flight, chunks and preemptions, in both orders."""
    requests = make_requests(*VARIED)
    single = make_executor(folder=folders[family], block_size=4)
    alone = {r.request_id: drive(single, [r], prefix_cache=False).answers[0] for r in requests}
    settings = {"depth": 2, "few_blocks": True, "host_cache_memory": "200KiB", "max_batch_tokens": 24}
    num_preemptions = num_restores = num_cached = 0
    for order in (requests, requests[::-1]):
        executor = build(make_executor, folders[family], family, settings)
        run = drive(executor, order)
        for request, answer in zip(order, run.answers, strict=True):
            assert answer.token_ids == alone[request.request_id].token_ids
            assert answer.finish_reason == FinishReason.LENGTH
        num_preemptions += run.num_preemptions
        num_restores += executor.num_restores
        num_cached += sum(answer.num_cached_tokens for answer in run.answers)
    assert num_preemptions > 0
    assert num_restores > 0
    assert num_cached > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_logits_that_are_not_finite_fail_their_sequence_alone(
    make_executor: Any, drive: Any, tmp_path: Path, kernels: str, depth: int
) -> None:
    """Token 130 has a NaN for a vector, and its KV lies in blocks that fall behind windows, are saved and reused."""
    folder = write_checkpoint(tmp_path / "whole", {**FAMILIES["qwen2"], "tie_word_embeddings": False})
    poisoned = tmp_path / "poisoned"
    shutil.copytree(folder, poisoned)
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][130] = float("nan")
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    healthy = [
        replace(r, prompt_token_ids=tuple(min(t, 129) for t in r.prompt_token_ids)) for r in make_requests(GREEDY)
    ]
    bias = replace(GREEDY, logit_bias=((130, -100.0),))
    healthy = [replace(r, sampling=bias) for r in healthy]
    settings = {"depth": depth, "few_blocks": True, "host_cache_memory": "1MiB"}
    single = make_executor(folder=folder, block_size=4)
    alone = [drive(single, [request], prefix_cache=False).token_ids[0] for request in healthy]
    requests = [
        replace(r, prompt_token_ids=(*r.prompt_token_ids[:20], 130, *r.prompt_token_ids[20:])) if i % 3 == 0 else r
        for i, r in enumerate(healthy)
    ]
    executor = build(make_executor, poisoned, "qwen2", settings, kernels=kernels)
    run = drive(executor, requests)
    for i, answer in enumerate(run.answers):
        if i % 3:
            assert answer.token_ids == alone[i]
        else:
            assert (answer.token_ids, answer.finish_reason) == ([INVALID_TOKEN], FinishReason.ERROR)
    assert executor.num_saves > 0
