"""A tiny random Llama, transformers' answers for it, and a loop that drives an executor by the real scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from aserve.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from aserve.core.request import FinishReason, Request, TokenLogprobs
from aserve.core.step import StepExecutor
from aserve.runtime.executor import LocalExecutor, build_executor
from aserve.scheduler import Scheduler
from aserve.testing import tiny_llama


@dataclass
class Answer:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0


@dataclass
class Run:
    """Answers by request, in the order of the requests, and how often sequences were preempted."""

    answers: list[Answer]
    num_preemptions: int

    @property
    def token_ids(self) -> list[list[int]]:
        return [answer.token_ids for answer in self.answers]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_executor(tiny_folder: Path) -> Callable[..., LocalExecutor]:
    def make(
        folder: Path = tiny_folder,
        *,
        device: Any = "cpu",
        kernels: Any = "auto",
        cuda_graphs: bool = True,
        **settings: Any,
    ) -> LocalExecutor:
        """``settings`` are fields of CacheConfig and SchedulerConfig."""
        cache = {k: settings.pop(k) for k in list(settings) if k in CacheConfig.__dataclass_fields__}
        return build_executor(
            EngineConfig(
                model=ModelConfig(
                    model="tiny", dtype="float32", device=device, kernels=kernels, cuda_graphs=cuda_graphs
                ),
                cache=CacheConfig(**cache),
                scheduler=SchedulerConfig(**settings),
            ),
            folder,
        )

    return make


@pytest.fixture(scope="session")
def drive() -> Callable[..., Run]:
    def run(executor: StepExecutor, requests: Sequence[Request], *, prefix_cache: bool = True) -> Run:
        """Run requests to their end, as the step loop does: plan ahead as far as the executor allows."""
        scheduler = Scheduler(executor.capacity, prefix_cache=prefix_cache)
        answers = {request.request_id: Answer() for request in requests}
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
                answer = answers[event.request_id]
                answer.token_ids.append(event.token_id)
                answer.logprobs.append(event.logprobs)
                answer.finish_reason = event.finish_reason
                answer.num_cached_tokens = event.num_cached_tokens
            num_unread -= 1
        return Run(list(answers.values()), scheduler.stats().num_preemptions)

    return run


@pytest.fixture(scope="session")
def transformers_model(tiny_folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def transformers_greedy(transformers_model: Any) -> Callable[[Sequence[int], int], tuple[list[int], torch.Tensor]]:
    @torch.inference_mode()
    def greedy(prompt: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """Return transformers' greedy continuation and the log-probabilities [num_tokens, V] it came from."""
        output = transformers_model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return output.sequences[0, len(prompt) :].tolist(), torch.stack(output.logits)[:, 0].log_softmax(-1)

    return greedy
