"""The speed of one backend beside another's: ``python -m aserve_kernels.bench [op ...]``.

Prints per shape the median time of a call, the bytes that the operation has to move, the rate that makes, and how many
times as long the other backend takes. Calls of the two alternate, so that a busy machine slows both. With one thread on
the CPU it is the thread's own time; on a GPU that of the kernels alone where they can be captured in a CUDA graph, else
it includes their launch (marked *).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from aserve_kernels.backends import BACKENDS, load
from aserve_kernels.cases import OPERATIONS, Inputs, Operation, Shape, make_inputs

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROUNDS = 15
_ROUND_S = 0.02  # how long the calls of one round take together
_GRAPH_CALLS = 20


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark of the named operations, or all."""
    parser = argparse.ArgumentParser(prog="python -m aserve_kernels.bench", description=__doc__)
    parser.add_argument("operations", nargs="*", metavar="op", help=f"of {', '.join(OPERATIONS)}")
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")
    parser.add_argument("--against", choices=BACKENDS, default="reference")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, help="torch's threads; 1 is for machines with other work")
    options = parser.parse_args(arguments)
    unknown = set(options.operations) - set(OPERATIONS)
    if unknown:
        parser.error(f"unknown operation {', '.join(sorted(unknown))}; known: {', '.join(OPERATIONS)}")
    if options.threads:
        torch.set_num_threads(options.threads)
    kernels, against = load(options.backend), load(options.against)
    print(f"{options.dtype} on {options.device}, {kernels.name} against {against.name}")
    print(f"{'operation':20} {'us':>9}  {'MB':>8} {'GB/s':>7} {'other/this':>10}  shape")
    for name in options.operations or OPERATIONS:
        operation = OPERATIONS[name]
        for shape in operation.bench_shapes:
            inputs = make_inputs(operation, shape, dtype=_DTYPES[options.dtype], device=options.device)
            calls = [_call(getattr(k, name), inputs) for k in (kernels, against)]
            with torch.inference_mode():
                (seconds, mark), (other_seconds, _) = _measure(calls, options.device)
            size = bytes_moved(operation, inputs)
            print(
                f"{name:20} {seconds * 1e6:9.1f}{mark or ' '} {size / 1e6:8.3f} {size / seconds / 1e9:7.1f} "
                f"{other_seconds / seconds:10.2f}  {_describe(shape)}",
                flush=True,
            )


def _call(function: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    return lambda: function(**inputs)


def _describe(shape: Shape) -> str:
    parts: list[str] = []
    for key, value in shape.items():
        alike = isinstance(value, list) and len(value) > 4
        parts.append(f"{key}={len(value)}x{value[0]}..{value[-1]}" if alike else f"{key}={value}")
    return " ".join(parts)


def bytes_moved(operation: Operation, inputs: Inputs) -> int:
    """Return how many bytes the operation must read and write at least, caches cold."""

    def size(*names: str) -> int:
        return sum(inputs[name].numel() * inputs[name].element_size() for name in names)

    match operation.name:
        case "rms_norm":
            return 2 * size("x") + size("weight")
        case "fused_add_rms_norm":
            return 2 * size("x", "residual") + size("weight")
        case "rotary":
            return 2 * size("q", "k") + len(inputs["positions"]) * inputs["cos_sin"].shape[1] * 4
        case "silu_and_mul" | "gelu_tanh_and_mul":
            return size("x") * 3 // 2
        case "store_kv":
            return 2 * size("k", "v")
        case "paged_attention":
            row = inputs["k_cache"][0, 0]
            query_lens = inputs["cu_seqlens_q"].diff()
            window = inputs["window"] or inputs["max_seq_len"]
            visible = inputs["seq_lens"].minimum(query_lens + window - 1).sum()
            return 2 * size("q") + 2 * int(visible) * row.numel() * row.element_size()
        case _:
            return size("logits")


def _measure(calls: list[Callable[[], Any]], device: str) -> list[tuple[float, str]]:
    """Return the median seconds of each call, and a mark if they include launches."""
    timers = [_cuda_timer(call) if device.startswith("cuda") else (_cpu_timer(call), "") for call in calls]
    rounds = [[timer() for timer, _ in timers] for _ in range(_ROUNDS)]
    return [
        (statistics.median(times), mark) for times, (_, mark) in zip(zip(*rounds, strict=True), timers, strict=True)
    ]


def _cpu_timer(call: Callable[[], Any]) -> Callable[[], float]:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    start = clock()
    call()
    repeats = max(1, int(_ROUND_S / (clock() - start)))

    def timer() -> float:
        start = clock()
        for _ in range(repeats):
            call()
        return (clock() - start) / repeats

    return timer


def _cuda_timer(call: Callable[[], Any]) -> tuple[Callable[[], float], str]:
    for _ in range(3):  # compile
        call()
    torch.cuda.synchronize()

    def calls() -> None:
        for _ in range(_GRAPH_CALLS):
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            calls()
        replay, mark = graph.replay, ""
    except RuntimeError:  # it waits for the device, as the reference does
        replay, mark = calls, "*"
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timer() -> float:
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / _GRAPH_CALLS

    return timer, mark


if __name__ == "__main__":
    main(sys.argv[1:])
