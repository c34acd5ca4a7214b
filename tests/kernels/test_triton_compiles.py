"""Every Triton kernel compiles for a Hopper GPU. The compiler needs no GPU, only a process that does not interpret."""

import os
import subprocess
import sys

import pytest

# Launches become compilations for compute capability 9.0.
COMPILE_ONLY = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver


class Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def compile_only(self, *args, grid, warmup, **options):
    return run(self, *args, grid=grid, warmup=True, **options)


driver.set_active(Driver())
run, JITFunction.run = JITFunction.run, compile_only

from aserve_kernels import load
from aserve_kernels.cases import OPERATIONS, make_inputs

kernels = load("triton")
"""
EVERY_KERNEL = """
for operation in OPERATIONS.values():
    for shape in (*operation.shapes[:2], *operation.shapes[-3:], operation.bench_shapes[-1]):
        inputs = make_inputs(operation, shape, dtype=torch.bfloat16)
        inputs = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        getattr(kernels, operation.name)(**inputs)
print("compiled")
"""


# The tensors are on the CPU: those without memory would all seem to be aligned.
DECODES = """
from aserve_kernels.triton import decode_attention

operation = OPERATIONS["paged_attention"]
sizes = operation.bench_shapes[0]
for seq_lens in ([1], [16], [2000], [63, 700], [5] * 3, [130] * 7, [40] * 33, [17] * 64):
    shape = {**sizes, "query_lens": [1] * len(seq_lens), "seq_lens": seq_lens}
    for window in (None, 1, 64):
        kernels.paged_attention(**{**make_inputs(operation, shape, dtype=torch.float32), "window": window})
for kernel in (decode_attention._decode_kernel, decode_attention._join_kernel):
    print(len(kernel.device_caches[0][0]))
"""


def compile_for_hopper(script, cache):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    return subprocess.run(
        [sys.executable, "-c", COMPILE_ONLY + script], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(600)  # a minute of compiling, on an idle core
def test_every_kernel_compiles_for_hopper(tmp_path):
    done = compile_for_hopper(EVERY_KERNEL, tmp_path)
    assert done.stdout == "compiled\n", done.stderr


def test_neither_lengths_nor_numbers_of_sequences_lead_to_another_compilation(tmp_path):
    """It would take a second, in which every stream stands still."""
    done = compile_for_hopper(DECODES, tmp_path)
    assert done.stdout == "2\n1\n", done.stderr  # with one split, and with several
