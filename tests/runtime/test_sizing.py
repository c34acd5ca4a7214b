"""What a start says about weights that do not fit, and how it corrects measured numbers for other limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from aserve.core.config import EngineConfig, ModelConfig
from aserve.core.memory import MemoryUse
from aserve.core.model_spec import ModelSpec
from aserve.planning.activations import graph_bytes, step_bytes
from aserve.planning.advice import sized_capacity
from aserve.planning.kv_size import Sizing, TooLittleMemoryError
from aserve.planning.limits import Limits
from aserve.runtime.profiling import Measured
from aserve.runtime.sizing import HostMeter, make_sizing, too_large, under_other_limits

GIB = 2**30
SPEC = ModelSpec.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
    }
)
LIMITS = Limits(max_num_seqs=64, max_batch_tokens=4096, max_in_flight=2, max_model_len=4096)


@pytest.mark.parametrize(
    ("needed", "free", "dtype_bytes", "advice"),
    [
        (30, 20, 4, "set --dtype bfloat16"),
        (30, 10, 4, "use a smaller or a quantized model, or --device cpu"),
        (30, 20, 2, "use a smaller or a quantized model, or --device cpu"),
        (20, 10, 2, "free what other programs hold"),
    ],
)
def test_weights_that_do_not_fit(needed: int, free: int, dtype_bytes: int, advice: str) -> None:
    error = too_large(needed * GIB, free=free * GIB, total=24 * GIB, dtype_bytes=dtype_bytes)
    assert error.message == (
        f"the model's weights take {needed}.00 GiB, but of the GPU's 24.00 GiB only {free}.00 GiB are free; {advice}"
    )


@pytest.mark.parametrize("graphs", [0, GIB])
def test_other_limits(graphs: int) -> None:
    """What was measured differs from the formula; the difference stays under other limits."""
    measured = MemoryUse(
        device="", on_gpu=True, total=24 * GIB, others=GIB, weights=GIB, activations=2 * GIB, graphs=graphs
    )
    memory_of = under_other_limits(measured, EngineConfig(model=ModelConfig(model="M")), SPEC, LIMITS, 2)
    fewer = replace(LIMITS, max_num_seqs=8, max_batch_tokens=512)
    here, there = (step_bytes(SPEC, x, dtype_bytes=2, block_size=16).total for x in (LIMITS, fewer))
    planned = graph_bytes(SPEC, fewer, dtype_bytes=2, block_size=16) if graphs else 0
    assert memory_of(fewer) == replace(measured, activations=2 * GIB + there - here, graphs=planned)
    assert there < here
    assert memory_of(LIMITS).activations == measured.activations


def test_the_host_is_metered_or_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after, expected in ((100, 350, 250), (100, 50, 0), (None, 350, 7), (100, None, 7)):
        monkeypatch.setattr("aserve.runtime.sizing.own_bytes", lambda value=before: value)
        meter = HostMeter()
        monkeypatch.setattr("aserve.runtime.sizing.own_bytes", lambda value=after: value)
        assert meter.read(7) == expected


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sizing]:
    """A sizing on a GPU of 24 GiB of which 23 are free, whose step was measured or ran out of memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (23 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: GIB // 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def make(measured: Measured | None, *, limits: Limits = LIMITS, **model: Any) -> Sizing:
        def measure(*_: Any, **__: Any) -> Measured:
            if measured is None:
                raise torch.OutOfMemoryError
            return measured

        monkeypatch.setattr("aserve.runtime.sizing.measure_gpu", measure)
        kernels = SimpleNamespace(can_be_captured=True)
        ctx = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda"), kernels=kernels)
        config = EngineConfig(model=ModelConfig(model="M", **model))
        return make_sizing(config, cast(Any, SimpleNamespace(spec=SPEC, ctx=ctx)), limits, HostMeter())

    return make


def test_measured_numbers_are_taken(on_gpu: Callable[..., Sizing]) -> None:
    measured = Measured(total=24 * GIB, others=GIB, weights=2 * GIB, activations=3 * GIB)
    memory = on_gpu(measured, cuda_graphs=False).memory_of(LIMITS)
    assert memory == MemoryUse(
        device="a GPU", on_gpu=True, total=24 * GIB, others=GIB, weights=2 * GIB, activations=3 * GIB
    )
    planned = graph_bytes(SPEC, LIMITS, dtype_bytes=2, block_size=16)
    assert on_gpu(measured).memory_of(LIMITS).graphs == planned > 0


def test_a_step_that_ran_out_of_memory_is_sized_by_the_formula(on_gpu: Callable[..., Sizing]) -> None:
    sizing = on_gpu(None)
    memory = sizing.memory_of(LIMITS)
    assert (memory.weights, memory.others) == (GIB // 2, GIB // 2)
    assert memory.activations > 23 * GIB
    with pytest.raises(TooLittleMemoryError, match="no memory is left for a KV cache"):
        sized_capacity(sizing)


def test_a_step_that_cannot_fit_is_not_tried(on_gpu: Callable[..., Sizing]) -> None:
    measured = Measured(total=24 * GIB, others=0, weights=0, activations=0)
    limits = replace(LIMITS, max_batch_tokens=2**28, max_num_seqs=2**20)
    sizing = on_gpu(measured, limits=limits)
    with pytest.raises(TooLittleMemoryError, match=r"a step's activations .*; set --max-batch-tokens \d+$"):
        sized_capacity(sizing)
