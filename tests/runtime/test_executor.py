"""A whole executor under the real scheduler, against transformers and against itself."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from aserve.core.capacity import Capacity
from aserve.core.config import EngineConfig, ModelConfig
from aserve.core.errors import ConfigError
from aserve.core.model_spec import ModelSpec
from aserve.core.request import FinishReason, Request, SamplingParams
from aserve.core.step import INVALID_TOKEN, NewSequence, ScheduledSequence, StepPlan
from aserve.planning.weights import num_parameters
from aserve.runtime import kv_cache
from aserve.runtime.executor import LocalExecutor, build_executor
from aserve.runtime.loader import load_model
from aserve.runtime.model_runner import ModelRunner
from aserve.testing import tiny_llama
from aserve_kernels import load

MAX_TOKENS = 20
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
LAYOUTS = {
    "roomy": {},
    "chunked": {"max_batch_tokens": 7},
    "few slots": {"max_num_seqs": 3},
    "preempted": {"kv_cache_tokens": 160, "block_size": 8},
    "preempted and chunked": {"kv_cache_tokens": 100, "block_size": 4, "max_batch_tokens": 16, "max_num_seqs": 6},
}


def make_prompts() -> list[tuple[int, ...]]:
    """Twelve prompts of 1 to 50 tokens; half of them begin alike, and two are equal."""
    rng = np.random.default_rng(0)
    common = tuple(rng.integers(0, 256, 33).tolist())
    prompts: list[tuple[int, ...]] = []
    for i, length in enumerate((1, 2, 15, 16, 17, 50)):
        prompts.append(tuple(rng.integers(0, 256, length).tolist()))
        prompts.append(common + tuple(rng.integers(0, 256, 1 + i).tolist()))
    prompts[9] = prompts[7]
    return prompts


PROMPTS = make_prompts()


def make_requests(*params: SamplingParams) -> list[Request]:
    """One request per prompt, with the parameters in turn."""
    return [
        Request(request_id=f"r{i}", prompt_token_ids=p, sampling=params[i % len(params)], arrival_index=i)
        for i, p in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="session")
def expected(transformers_greedy: Any) -> list[list[int]]:
    return [transformers_greedy(prompt, MAX_TOKENS)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_tokens_are_those_of_transformers(
    make_executor: Any, drive: Any, expected: list[list[int]], layout: str, depth: int, prefix_cache: bool
) -> None:
    executor = make_executor(max_in_flight=depth, **LAYOUTS[layout])
    run = drive(executor, make_requests(GREEDY), prefix_cache=prefix_cache)
    assert run.token_ids == expected
    assert all(answer.finish_reason == FinishReason.LENGTH for answer in run.answers)
    assert (run.num_preemptions > 0) == ("preempted" in layout)
    if prefix_cache and layout == "few slots":
        assert sum(answer.num_cached_tokens > 0 for answer in run.answers) >= 4


VARIED = [
    SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=1),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.9, top_k=40, seed=2, presence_penalty=0.5),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=1.5, min_p=0.05, seed=3, frequency_penalty=1.0),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0, repetition_penalty=1.3, num_logprobs=2),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=4, min_tokens=10, logit_bias=((65, 2.0),),
                   stop_token_ids=tuple(range(60, 120))),
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(tiny_folder: Path, drive: Any) -> list[Any]:
    """Every request's answer when it runs by itself."""
    config = EngineConfig(model=ModelConfig(model="tiny", dtype="float32", device="cpu"))
    return [drive(build_executor(config, tiny_folder), [request]).answers[0] for request in make_requests(*VARIED)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampled_tokens_do_not_depend_on_the_company(
    make_executor: Any, drive: Any, alone: list[Any], layout: str, depth: int
) -> None:
    executor = make_executor(max_in_flight=depth, **LAYOUTS[layout])
    for requests in (make_requests(*VARIED), make_requests(*VARIED)[::-1]):
        run = drive(executor, requests)
        by_id = dict(zip((r.request_id for r in requests), run.answers, strict=True))
        for i, single in enumerate(alone):
            assert by_id[f"r{i}"].token_ids == single.token_ids
            assert by_id[f"r{i}"].finish_reason == single.finish_reason
            for got, want in zip(by_id[f"r{i}"].logprobs, single.logprobs, strict=True):
                assert (got is None) == (want is None)
                assert got is None or got.logprob == pytest.approx(want.logprob, abs=1e-4)


def test_another_seed_gives_another_text(make_executor: Any, drive: Any) -> None:
    first, second = VARIED[0], replace(VARIED[0], seed=99)
    executor = make_executor()
    assert drive(executor, make_requests(first)).token_ids != drive(executor, make_requests(second)).token_ids


def test_stop_ids_and_min_tokens(make_executor: Any, drive: Any, expected: list[list[int]]) -> None:
    stop = expected[5][4]
    params = replace(GREEDY, stop_token_ids=(stop,))
    executor = make_executor()
    request = make_requests(params)[5]
    assert drive(executor, [request]).token_ids == [expected[5][: expected[5].index(stop) + 1]]
    later = drive(executor, [replace(request, sampling=replace(params, min_tokens=12))]).answers[0]
    assert stop not in later.token_ids[:12]


def test_logprobs_are_those_of_transformers(make_executor: Any, drive: Any, transformers_greedy: Any) -> None:
    run = drive(make_executor(max_batch_tokens=20), make_requests(replace(GREEDY, num_logprobs=5), GREEDY))
    for i, (prompt, answer) in enumerate(zip(PROMPTS, run.answers, strict=True)):
        if i % 2:
            assert answer.logprobs == [None] * MAX_TOKENS
            continue
        token_ids, reference = transformers_greedy(prompt, MAX_TOKENS)
        for token_id, row, entry in zip(token_ids, reference, answer.logprobs, strict=True):
            best = row.topk(5)
            assert entry.token_id == token_id == entry.top[0][0]
            assert [i for i, _ in entry.top] == best.indices.tolist()
            assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert entry.logprob == entry.top[0][1]


def test_held_back_tokens_are_no_alternatives(make_executor: Any, drive: Any) -> None:
    """A probability of 0 has no logarithm that JSON could carry."""
    params = replace(GREEDY, min_tokens=3, max_tokens=3, stop_token_ids=tuple(range(255)), num_logprobs=20)
    for answer in drive(make_executor(), make_requests(params)).answers:
        for entry in answer.logprobs:
            assert [i for i, _ in entry.top if i < 255] == []
            assert len(entry.top) == 260 - 255


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("filling", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("layout", ["roomy", "chunked", "preempted and chunked"])
def test_what_unwritten_cache_memory_holds_is_never_seen(
    tiny_folder: Path, drive: Any, expected: list[list[int]], kernels: str, filling: float, layout: str
) -> None:
    settings: dict[str, int] = {"block_size": 16, "max_num_seqs": 12, "max_batch_tokens": 512} | LAYOUTS[layout]
    num_tokens = settings.pop("kv_cache_tokens", 2048)
    capacity = Capacity(num_blocks=num_tokens // settings["block_size"], max_model_len=512, **settings)
    cpu = torch.device("cpu")
    model = load_model(tiny_folder, dtype=torch.float32, device=cpu, kernels=load(kernels))
    caches = kv_cache.allocate(
        model.spec, num_blocks=capacity.num_blocks, block_size=capacity.block_size, dtype=torch.float32, device=cpu
    )
    for pair in caches:
        for tensor in pair:
            tensor.fill_(filling)
    run = drive(LocalExecutor(ModelRunner(model, caches, capacity), capacity, lazy=True), make_requests(GREEDY))
    assert run.token_ids == expected


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_with_logits_that_are_not_finite_fails_alone(
    tmp_path: Path,
    tiny_folder: Path,
    make_executor: Any,
    drive: Any,
    expected: list[list[int]],
    kernels: str,
    depth: int,
) -> None:
    """Token 259 has a NaN for a vector. Its KV stays in the cache when the blocks are given to others."""
    folder = tmp_path / "poisoned"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][259] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    executor = make_executor(folder=folder, kernels=kernels, kv_cache_tokens=160, max_num_seqs=4, max_in_flight=depth)
    requests = make_requests(GREEDY)
    for i in range(0, 12, 3):
        sampling = replace(GREEDY, num_logprobs=2, temperature=0.5 * (i % 2))
        requests[i] = replace(requests[i], prompt_token_ids=(*PROMPTS[i], 259, 1), sampling=sampling)
    run = drive(executor, requests)
    for i, answer in enumerate(run.answers):
        if i % 3:
            assert answer.token_ids == expected[i]
        else:
            assert (answer.token_ids, answer.finish_reason) == ([INVALID_TOKEN], FinishReason.ERROR)
            assert answer.logprobs == [None]


def test_chunks_without_a_sampling_row(make_executor: Any) -> None:
    executor = make_executor()
    new = NewSequence(GREEDY, 4, ())
    executor.submit(StepPlan(0, (ScheduledSequence("a", 0, 0, (1, 2), ((0,),), False, new),)))
    result = executor.wait()
    assert (result.step_id, result.sampled, dict(result.logprobs)) == (0, (), {})


def test_results_come_in_order_and_close_is_idempotent(make_executor: Any) -> None:
    executor = make_executor(max_in_flight=2)
    new = NewSequence(GREEDY, 1, ())
    for step in range(2):
        executor.submit(StepPlan(step, (ScheduledSequence("a", step, 0, (1,), ((step,),), True, new),)))
    assert [executor.wait().step_id, executor.wait().step_id] == [0, 1]
    executor.close()
    executor.close()


def test_capacity_and_defaults(make_executor: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "aserve.runtime"):
        capacity = make_executor().capacity
    assert capacity == Capacity(
        num_blocks=32 * 512 // 16,
        block_size=16,
        max_num_seqs=32,
        max_batch_tokens=512,
        max_model_len=512,
        vocab_size=260,
        parity_context=120,
    )
    loaded, table = [r.getMessage() for r in caplog.records if r.name == "aserve.runtime.executor"]
    kernels = load("cpu").description
    assert kernels.startswith("cpu (")  # and in what form: C or torch
    assert loaded == (
        f"loaded LlamaForCausalLM: 0.1 M parameters, float32 on cpu, {kernels} kernels; 32 sequences and 512 tokens "
        "per step, context 512"
    )
    assert "KV cache 8.0 MiB, " in table
    assert table.endswith("; 16384 KV tokens, longest request 512 tokens, 32 of that length in parallel")
    assert capacity.memory is not None
    assert capacity.memory.kv_cache == 16384 * 512
    assert capacity.memory.total > capacity.memory.taken > 0


def test_weights_in_the_table_are_what_loading_took(tmp_path: Path, make_executor: Any) -> None:
    folder = tiny_llama(tmp_path, hidden_size=512, intermediate_size=4096, num_hidden_layers=3)
    stored = (folder / "model.safetensors").stat().st_size
    memory = make_executor(folder=folder).capacity.memory
    assert stored * 0.9 < memory.weights < stored * 1.5


def test_parameters_in_the_summary_are_those_of_the_checkpoint(tiny_folder: Path) -> None:
    weights = load_file(tiny_folder / "model.safetensors")
    assert num_parameters(ModelSpec.from_folder(tiny_folder)) == sum(w.numel() for w in weights.values())


def test_a_cache_smaller_than_the_context_is_warned_of(make_executor: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert make_executor(kv_cache_tokens=100).capacity.max_length == 112
    assert "the KV cache holds 112 tokens, so a request is limited to 112 tokens" in caplog.text
    assert "set --kv-cache-tokens 512 for 512, or set --max-model-len 112 to make" in caplog.text
    caplog.clear()
    assert make_executor(kv_cache_tokens=512).capacity.max_length == 512
    assert "limited" not in caplog.text


@pytest.mark.parametrize(
    ("setting", "flag"),
    [({"kv_cache_memory": "9999GiB"}, "--kv-cache-memory"), ({"kv_cache_tokens": 10**12}, "--kv-cache-tokens")],
)
def test_too_little_memory_says_what_works(make_executor: Any, setting: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"weights take .*; set {flag} \S+$") as caught:
        make_executor(**setting)
    value = caught.value.message.split()[-1]
    assert value != next(iter(setting.values()))


@pytest.mark.parametrize(("max_model_len", "expected_len"), [(None, 512), (512, 512), (100, 100)])
def test_max_model_len(tiny_folder: Path, max_model_len: int | None, expected_len: int) -> None:
    config = EngineConfig(model=ModelConfig(model="tiny", device="cpu", max_model_len=max_model_len))
    assert build_executor(config, tiny_folder).capacity.max_model_len == expected_len


def test_max_model_len_beyond_the_model(tiny_folder: Path) -> None:
    config = EngineConfig(model=ModelConfig(model="tiny", device="cpu", max_model_len=513))
    with pytest.raises(ConfigError, match="--max-model-len 513 is more than the model's context of 512 tokens"):
        build_executor(config, tiny_folder)


@pytest.mark.parametrize("num_seqs", [10**12, 10**15])
def test_more_slots_than_the_host_holds(make_executor: Any, num_seqs: int) -> None:
    with pytest.raises(ConfigError, match=f"--max-num-seqs {num_seqs}: .* GiB of host memory do not hold the tables"):
        make_executor(max_num_seqs=num_seqs)


def test_memory_that_runs_out_at_the_end_of_the_start(make_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("aserve.runtime.executor.ModelRunner", fail)
    with pytest.raises(ConfigError, match="--max-num-seqs 32: "):
        make_executor()


@pytest.mark.parametrize(("asked", "used"), [(None, 1), (3, 3)])
def test_threads_of_a_tiny_model(tiny_folder: Path, asked: int | None, used: int) -> None:
    """The setting belongs to the thread that computes, so it has to be made there."""
    seen: list[int] = []

    def step_thread() -> None:
        build_executor(EngineConfig(model=ModelConfig(model="tiny", device="cpu", num_threads=asked)), tiny_folder)
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    thread = threading.Thread(target=step_thread)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert seen == [used]


def test_the_config_is_read_once(make_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    read = ModelSpec.from_folder
    monkeypatch.setattr(ModelSpec, "from_folder", lambda folder: calls.append(folder) or read(folder))
    make_executor()
    assert len(calls) == 1


def test_a_default_device_that_the_program_set_does_not_matter(
    make_executor: Any, drive: Any, expected: list[list[int]]
) -> None:
    with torch.device("meta"):
        assert drive(make_executor(max_batch_tokens=40), make_requests(GREEDY)).token_ids == expected


def test_progress_reaches_the_end(tiny_folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    progress: Callable[[int, int], None] = lambda done, total: calls.append((done, total))  # noqa: E731
    build_executor(EngineConfig(model=ModelConfig(model="tiny", device="cpu")), tiny_folder, progress=progress)
    assert calls[-1][0] == calls[-1][1] > 0
