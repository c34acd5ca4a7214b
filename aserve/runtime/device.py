"""Which device, dtype, kernels and number of threads a configuration means on this machine.

Called once, by ``build_executor``; nothing else asks what hardware there is.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

import aserve_kernels
from aserve.core.config import ModelConfig
from aserve.core.errors import ConfigError
from aserve_kernels import KernelSet

_log = logging.getLogger(__name__)

_DEFAULT_THREADS = torch.get_num_threads()  # one per core, or OMP_NUM_THREADS; read before anything changes it
_SMALL_BYTES = 64 * 2**20


def choose_device(config: ModelConfig) -> torch.device:
    """Return the first CUDA device or the CPU. Raises ConfigError when CUDA is asked for and not there."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        built = torch.version.cuda is not None
        why = "no usable GPU was found" if built else "the installed torch is a CPU build"
        raise ConfigError(f"--device cuda: {why}; use --device cpu, or leave the flag out")
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(config: ModelConfig, checkpoint_dtype: str | None, device: torch.device) -> torch.dtype:
    """Return the dtype of weights, activations and KV.

    Auto is the checkpoint's (float32 for float64, bfloat16 for anything unknown), except that half precision which the
    device has no instructions for is replaced. On a CPU without bfloat16 instructions that is float32, on one
    with them float16 becomes bfloat16 (float16 was 3 to 15 times slower at batch sizes above 1 on a Zen 5); on a GPU
    older than Ampere bfloat16 becomes float16.
    """
    if config.dtype != "auto":
        if config.dtype == "float16" and device.type == "cpu":
            _log.warning("float16 is slow on most CPUs; bfloat16 or float32 may be faster")
        return _DTYPES[config.dtype]
    if checkpoint_dtype in ("float32", "float64"):
        return torch.float32
    dtype = _DTYPES.get(checkpoint_dtype or "", torch.bfloat16)
    if device.type == "cpu":
        return torch.bfloat16 if has_cpu_bfloat16() else torch.float32
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return dtype


def has_cpu_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 matrices in hardware."""
    # torch.cpu.get_capabilities came after torch 2.9; without it nothing is known, and float32 is always right.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def choose_kernels(config: ModelConfig, device: torch.device, cache_dir: Path | None = None) -> KernelSet:
    """Load a kernel set, which may keep what it compiles under ``cache_dir``.

    Raises ConfigError when it cannot run on the device or is not installed.
    """
    name = config.kernels
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu"
    wanted = {"triton": "cuda", "cpu": "cpu"}.get(name, device.type)
    if wanted != device.type:
        raise ConfigError(f"--kernels {name} runs on {wanted} only, not on {device.type}; leave the flag out")
    try:
        return aserve_kernels.load(name, cache_dir)
    except ImportError as error:
        raise ConfigError(f"--kernels {name} cannot be loaded: {error}; --kernels reference always works") from error


def choose_num_threads(config: ModelConfig, device: torch.device, weight_bytes: int) -> int | None:
    """Return how many threads compute, None on a GPU. Raises ConfigError for a number that a GPU has no use for.

    A step of a small model is over before threads are worth it, and where its cores are busy otherwise, each of its
    operations waits for a thread that is not running: a step of 2 ms took 100 ms on two cores shared with clients.
    """
    if device.type != "cpu":
        if config.num_threads is not None:
            raise ConfigError(f"--num-threads is for the CPU, not for {device.type}; leave the flag out")
        return None
    if config.num_threads is not None:
        return config.num_threads
    return 1 if weight_bytes < _SMALL_BYTES else _DEFAULT_THREADS


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
