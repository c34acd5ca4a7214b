"""Vectors of decoders against transformers: last and mean, in chunks, beside answers, preempted, over prefixes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from aserve.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from aserve.core.pooling import PoolingKind, PoolingParams
from aserve.core.request import FinishReason, Request, SamplingParams
from aserve.core.step import POOLED, StepExecutor, StepPlan
from aserve.runtime.executor import build_executor
from aserve.scheduler import Scheduler
from tests.checkpoints import FAMILIES, write_checkpoint

KINDS = (PoolingKind.LAST, PoolingKind.MEAN, PoolingKind.FIRST)
LAYOUTS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_batch_tokens": 7},
    "overlapped": {"max_batch_tokens": 9, "max_in_flight": 2},
    "preempted": {"kv_cache_tokens": 72, "block_size": 4, "max_batch_tokens": 16, "max_in_flight": 2},
}
LENGTHS = (1, 2, 15, 16, 17, 40, 40, 7, 8)


def make_prompts() -> list[tuple[int, ...]]:
    """The two of 40 tokens begin alike, so the second finds the first's prefix."""
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(0, 131, length).tolist()) for length in LENGTHS]
    prompts[6] = prompts[5][:33] + prompts[6][33:]
    return prompts


PROMPTS = make_prompts()


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("decoders") / request.param, FAMILIES[request.param])


@pytest.fixture(scope="module")
def states(folder: Path) -> list[np.ndarray]:
    """transformers' hidden states [tokens, H] after the last norm."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in PROMPTS]


def expected(states: np.ndarray, params: PoolingParams) -> np.ndarray:
    pools = {PoolingKind.LAST: states[-1], PoolingKind.MEAN: states.mean(0), PoolingKind.FIRST: states[0]}
    vector = pools[params.kind][: params.dimensions]
    return vector / np.linalg.norm(vector) if params.normalize else vector


def build(folder: Path, *, device: Any = "cpu", **settings: Any) -> StepExecutor:
    cache = {name: settings.pop(name) for name in list(settings) if name in CacheConfig.__dataclass_fields__}
    config = EngineConfig(
        model=ModelConfig(model="tiny", dtype="float32", device=device),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**settings),
    )
    return build_executor(config, folder)


def drive(executor: StepExecutor, requests: list[Request]) -> dict[str, list[Any]]:
    """Run to the end as the step loop does; returns the events by request."""
    scheduler = Scheduler(executor.capacity)
    events: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    num_unread = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        if plan is not None:
            executor.submit(plan)
            num_unread += 1
            if num_unread < executor.capacity.max_in_flight:
                continue
        for event in scheduler.commit(executor.wait()):
            events[event.request_id].append(event)
        num_unread -= 1
    return events


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vectors_are_those_of_transformers(folder: Path, states: list[np.ndarray], layout: str) -> None:
    executor = build(folder, **LAYOUTS[layout])
    generating = SamplingParams(max_tokens=6, temperature=0, num_logprobs=2)
    pooled = [
        PoolingParams(kind=kind, normalize=bool(n % 2), dimensions=(None, 48, 16)[n % 3])
        for n, kind in enumerate(KINDS * 3)
    ]
    requests: list[Request] = []
    for n, (prompt, params) in enumerate(zip(PROMPTS, pooled, strict=True)):
        plain = Request(request_id=f"t{n}", prompt_token_ids=prompt, sampling=generating, arrival_index=2 * n)
        requests.append(replace(plain, request_id=f"v{n}", pooling=params, arrival_index=2 * n + 1))
        if n % 2:
            requests.append(plain)
    events = drive(executor, requests)
    alone = drive(build(folder), [r for r in requests if r.pooling is None])
    for n, params in enumerate(pooled):
        (event,) = events[f"v{n}"]
        assert (event.token_id, event.finish_reason) == (POOLED, FinishReason.STOP)
        vector = np.frombuffer(event.vector, "<f4")
        np.testing.assert_allclose(vector, expected(states[n], params), rtol=1e-4, atol=2e-5)
    for name, answer in alone.items():  # what is generated beside them is what it is anyway
        assert [event.token_id for event in events[name]] == [event.token_id for event in answer]
        for got, want in zip(events[name], answer, strict=True):
            assert got.logprobs.logprob == pytest.approx(want.logprobs.logprob, abs=1e-4)


def test_a_vector_that_is_not_finite_is_an_error_of_its_request_alone(folder: Path) -> None:
    executor = build(folder)
    mean = PoolingParams(kind=PoolingKind.MEAN)
    requests = [
        Request(request_id=f"v{n}", prompt_token_ids=PROMPTS[n + 3], sampling=SamplingParams(max_tokens=1),
                pooling=mean, arrival_index=n)
        for n in range(3)
    ]  # fmt: skip
    forward: Any = executor._runner._model.forward  # type: ignore[attr-defined]

    def broken(batch: Any) -> torch.Tensor:
        hidden = forward(batch)
        hidden[int(batch.cu_seqlens_q[1])] = torch.nan  # the first token of the second prompt
        return hidden

    executor._runner._model.forward = broken  # type: ignore[attr-defined]
    events = drive(executor, requests)
    assert [events[f"v{n}"][0].finish_reason for n in range(3)] == ["stop", "error", "stop"]


@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_a_decoder_saved_without_its_head(folder: Path, tmp_path: Path, architecture: str) -> None:
    """As sentence-transformers saves it: names without a prefix, no head, whatever the config says of one."""
    if folder.name != "qwen3":
        pytest.skip("one family is enough")
    transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert not settings["tie_word_embeddings"]
    request = Request(
        request_id="v", prompt_token_ids=PROMPTS[4], sampling=SamplingParams(max_tokens=1),
        pooling=PoolingParams(kind=PoolingKind.LAST),
    )  # fmt: skip
    whole, bare = (drive(build(each), [request])["v"][0].vector for each in (folder, tmp_path))
    assert whole == bare


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_makes_the_same_vectors_and_never_waits(folder: Path, states: list[np.ndarray], layout: str) -> None:
    executor = build(folder, device="cuda", **{"kv_cache_tokens": 2048, **LAYOUTS[layout]})
    submit = executor.submit

    def submit_without_waiting(plan: StepPlan) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            submit(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    executor.submit = submit_without_waiting  # type: ignore[method-assign]
    params = [PoolingParams(kind=kind, dimensions=(None, 16)[n % 2]) for n, kind in enumerate(KINDS * 3)]
    requests = [
        Request(request_id=f"v{n}", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1),
                pooling=pooling, arrival_index=n)
        for n, (prompt, pooling) in enumerate(zip(PROMPTS, params, strict=True))
    ]  # fmt: skip
    events = drive(executor, requests)
    for n, pooling in enumerate(params):
        vector = np.frombuffer(events[f"v{n}"][0].vector, "<f4")
        np.testing.assert_allclose(vector, expected(states[n], pooling), atol=2e-3)
