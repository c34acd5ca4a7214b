"""The formulas of weights and of a step's peak against the tensors that the real code makes, for real sizes.

The code runs on the meta device, on which tensors have sizes and no memory; kernels launch nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from aserve.core.kv_layout import KVLayout
from aserve.core.model_spec import ModelSpec
from aserve.distributed.group import SoloGroup
from aserve.layers.context import LayerContext
from aserve.models.registry import model_class
from aserve.planning.activations import PENALTY_SCRATCH_BYTES, decode_splits, penalty_state_bytes, step_bytes
from aserve.planning.limits import Limits
from aserve.planning.weights import weight_bytes
from aserve.quantization.unquantized import UnquantizedScheme
from aserve.runtime import forward_batch, model_runner, penalties, sampler
from aserve.runtime.profiling import largest_plan, make_runner, unmeasured_table_bytes
from aserve_kernels import load
from aserve_kernels.triton import decode_attention

META = torch.device("meta")
ALIGNMENT = 64
BLOCK_SIZE = 16


class LiveBytes(TorchDispatchMode):
    """``live`` bytes of meta tensors now, ``peak`` at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def restart(self) -> int:
        """Forget the peak so far; returns what is alive."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.logsumexp.default:  # its CUDA code holds exp(x - max) as a whole
            self.peak = max(self.peak, self.live + args[0].nbytes)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def to_meta(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """In one piece, as arrays reach a GPU."""
    offsets = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
    packed = torch.empty(offsets[-1], dtype=torch.uint8, device=device)
    return [
        packed[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(offsets, arrays, strict=False)
    ]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModelSpec, Limits], tuple[int, int]]:
    """(bytes of weights, peak of the profiled step) of a bfloat16 model."""
    monkeypatch.setattr(JITFunction, "run", lambda *_args, **_options: None)
    # kernels of a process that interprets, because tests of kernels have come first
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_args, **_options: None)
    for module in (forward_batch, sampler, penalties, model_runner):
        monkeypatch.setattr(module, "to_device", to_meta)
    monkeypatch.setattr(model_runner, "to_host", lambda tensor: tensor)

    def run(spec: ModelSpec, limits: Limits) -> tuple[int, int]:
        ctx = LayerContext(
            kernels=load("triton"), group=SoloGroup(), quant=UnquantizedScheme(), dtype=torch.bfloat16, device=META
        )
        num_groups = len(KVLayout.of(spec.sliding_windows).groups)
        plan = largest_plan(limits, block_size=BLOCK_SIZE, num_groups=num_groups)
        tables = unmeasured_table_bytes(limits, block_size=BLOCK_SIZE, num_groups=num_groups)
        with torch.inference_mode(), LiveBytes() as bytes_:
            model = model_class(spec.architecture)(spec, ctx, limits.max_model_len)
            for target in model.weight_targets().values():
                target.layer.finish_loading()
            weights = bytes_.live
            runner = make_runner(model, limits, block_size=BLOCK_SIZE)
            before = bytes_.restart()
            runner.launch(plan)
            return weights, bytes_.peak - before - runner.penalty_bytes + tables

    return run


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen2-7b", {}),
        ("qwen2-7b", {"max_num_seqs": 1024, "max_batch_tokens": 2048}),
        ("qwen2-7b", {"max_num_seqs": 1, "max_batch_tokens": 512}),
        ("qwen3-0.6b", {"max_model_len": 32768}),
        ("qwen3-0.6b", {"max_num_seqs": 64, "max_batch_tokens": 64}),
        ("llama3-8b", {"max_batch_tokens": 2048, "max_num_seqs": 16}),
        ("llama3-8b", {"max_model_len": 100, "max_num_seqs": 3}),
        ("mistral-7b", {}),
        ("gemma2-2b", {"max_model_len": 8192}),
        ("gemma3-4b", {"max_batch_tokens": 1024}),
        ("phi4", {}),
        ("olmo2-7b", {"max_model_len": 4000}),
        ("glm4-9b", {}),
        ("command-r-plus", {}),
        ("starcoder2-3b", {}),
        ("mixtral-8x7b", {}),
        ("qwen2-moe-57b", {}),
        ("qwen3-30b-a3b", {}),
    ],
)
def test_the_formulas_are_those_of_the_code(
    measure: Callable[[ModelSpec, Limits], tuple[int, int]],
    specs: dict[str, ModelSpec],
    make_limits: Callable[..., Limits],
    model: str,
    changes: dict[str, int],
) -> None:
    spec, limits = specs[model], make_limits(**changes)
    weights, peak = measure(spec, limits)
    assert weight_bytes(spec, dtype_bytes=2, max_model_len=limits.max_model_len).total == weights
    step = step_bytes(spec, limits, dtype_bytes=2, block_size=BLOCK_SIZE)
    computed = step.total - step.workspace - step.penalties
    assert computed == pytest.approx(peak, rel=0.002, abs=2**17)
    state = penalty_state_bytes(limits.max_num_seqs, vocab_size=spec.vocab_size, max_length=limits.max_model_len)
    assert step.penalties == PENALTY_SCRATCH_BYTES + state


def test_decode_attention_is_planned_with_the_splits_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    for num_programs in (1, 8, 64, 100, 131, 132, 133, 200, 264, 265, 527, 528, 529, 4096):
        assert decode_splits(num_programs) == decode_attention._num_splits(num_programs, torch.device("cuda"))
