"""Every Triton kernel compiles for a Hopper GPU. The compiler needs no GPU, only a process that does not interpret."""

import os
import subprocess
import sys

# Launches become compilations for compute capability 9.0, and tensors have no memory.
SCRIPT = """
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
for operation in OPERATIONS.values():
    for shape in (*operation.shapes[:2], *operation.shapes[-2:], operation.bench_shapes[-1]):
        inputs = make_inputs(operation, shape, dtype=torch.bfloat16)
        inputs = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        getattr(kernels, operation.name)(**inputs)
print("compiled")
"""


def test_every_kernel_compiles_for_hopper(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "compiled\n", done.stderr
