"""Compares what ``aserve plan`` says with what the engine allocates on this machine's GPU, for three shapes of models.

    PYTHONPATH=. python tests/benchmarks/plan_against_gpu.py [--out FOLDER]

The engine is built as ``aserve serve`` builds it: limits, profile, KV cache, CUDA graphs. Only the weights are zeros,
so no checkpoint is needed. One process for each shape. Prints planned and allocated bytes by row with their difference,
and writes them as JSON. Ends with code 1 if a planned number of KV tokens is more than 3 % off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

COMMON = {"vocab_size": 152192, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-7b": {
        **COMMON, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 18944,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **COMMON, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "llama3-8b": {
        **COMMON, "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
ROWS = ("weights", "activations", "graphs", "others", "kv_cache")
TOLERANCE = 0.03


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.shape is not None:
        print(json.dumps(compare(arguments.shape)))
        return 0
    results: dict[str, Any] = {}
    for name in SHAPES:
        command = [sys.executable, __file__, "--shape", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"{name}: failed with code {done.returncode}")
            return 1
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print("\n".join(report(name, results[name])), flush=True)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "plan_against_gpu.json").write_text(json.dumps(results, indent=1))
    worst = max(abs(difference(result, "tokens")) for result in results.values())
    print(f"KV tokens: at most {100 * worst:.2f} % off, {100 * TOLERANCE:g} % are allowed")
    return int(worst > TOLERANCE)


def compare(name: str, device: Literal["cuda", "cpu"] = "cuda") -> dict[str, Any]:
    """Planned and allocated numbers of one shape, and what helps to explain a difference."""
    import torch

    from aserve.core.config import EngineConfig, ModelConfig
    from aserve.planning.activations import step_bytes
    from aserve.planning.plan import Device, capacity_of, make_plan
    from aserve.planning.step_shapes import step_shapes
    from aserve.runtime import executor

    config = EngineConfig(model=ModelConfig(model=name, device=device))
    executor.load_model = load_zeros
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[name]))
        built = executor.build_executor(config, Path(folder))
    allocated = built.capacity
    plan = make_plan(EngineConfig(model=ModelConfig(model=name)), SHAPES[name], Device(total=allocated.memory.total))
    planned = capacity_of(plan)
    step = step_bytes(plan.spec, plan.sizing.limits, dtype_bytes=2, block_size=allocated.block_size)
    result = {"total": allocated.memory.total, "tokens": [planned.num_kv_tokens, allocated.num_kv_tokens]}
    for row in ROWS:
        result[row] = [getattr(planned.memory, row), getattr(allocated.memory, row)]
    notes = {field: getattr(step, field) for field in step.__dataclass_fields__}
    notes["captured steps"] = 2**20 * len(step_shapes(max_num_seqs=allocated.max_num_seqs, max_batch_tokens=8192))
    notes["allocated after all"] = torch.cuda.memory_allocated()
    notes["reserved after all"] = torch.cuda.memory_reserved()
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        notes["used after all, of the device"] = total - free
    built.close()
    return {**result, "notes": notes}


def load_zeros(folder: Path, *, spec: Any, dtype: Any, device: Any, kernels: Any, max_model_len: int, **_: Any) -> Any:
    """A model of a shape, loaded tensor by tensor as from a checkpoint whose weights are all 0."""
    import torch

    from aserve.distributed.group import SoloGroup
    from aserve.layers.context import LayerContext
    from aserve.models.registry import model_class
    from aserve.quantization.registry import load_scheme

    scheme = load_scheme(None)
    ctx = LayerContext(kernels=kernels, group=SoloGroup(), quant=scheme, dtype=dtype, device=device)
    model = model_class(spec.architecture)(spec, ctx, max_model_len)
    zero = torch.zeros((), dtype=dtype, device=device)
    layers: dict[int, Any] = {}
    for target in model.weight_targets().values():
        target.layer.load(target.shard, target.name, zero.expand(target.shape))
        layers[id(target.layer)] = target.layer
    for layer in layers.values():
        layer.finish_loading()
    return model


def difference(result: dict[str, Any], row: str) -> float:
    planned, allocated = result[row]
    return (planned - allocated) / max(allocated, 1)


def report(name: str, result: dict[str, Any]) -> Iterator[str]:
    yield f"{name} on {result['total'] / 2**30:.2f} GiB{'planned':>15}{'allocated':>15}{'difference':>12}"
    for row in ROWS:
        planned, allocated = (size / 2**20 for size in result[row])
        yield f"  {row:20}{planned:>13.1f} MiB{allocated:>11.1f} MiB{100 * difference(result, row):>10.2f} %"
    planned, allocated = result["tokens"]
    yield f"  {'KV tokens':20}{planned:>17,}{allocated:>15,}{100 * difference(result, 'tokens'):>10.2f} %"
    for note, size in result["notes"].items():
        yield f"    {note}: {size / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
