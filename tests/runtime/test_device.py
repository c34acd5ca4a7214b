"""What a configuration means on this machine. Hardware is replaced where the answer depends on it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch

from aserve.core.config import ModelConfig
from aserve.core.errors import ConfigError
from aserve.runtime.device import choose_device, choose_dtype, choose_kernels, choose_num_threads

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(model="m", **changes)


@pytest.mark.parametrize(
    ("flag", "checkpoint", "bfloat16_cpu", "expected"),
    [
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("auto", "float16", True, torch.bfloat16),
        ("auto", "float16", False, torch.float32),
        ("auto", "float32", True, torch.float32),
        ("auto", None, True, torch.bfloat16),
        ("auto", None, False, torch.float32),
        ("auto", "float64", True, torch.float32),
        ("auto", "float8_e4m3fn", True, torch.bfloat16),
        ("bfloat16", "float32", False, torch.bfloat16),
        ("float32", "bfloat16", True, torch.float32),
    ],
)
def test_dtype_on_cpu(
    monkeypatch: pytest.MonkeyPatch, flag: Any, checkpoint: str | None, bfloat16_cpu: bool, expected: torch.dtype
) -> None:
    capabilities = MappingProxyType({"avx512_bf16": bfloat16_cpu, "architecture": "x86_64"})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert choose_dtype(config(dtype=flag), checkpoint, CPU) == expected


@pytest.mark.parametrize(
    ("checkpoint", "capability", "expected"),
    [
        ("bfloat16", (9, 0), torch.bfloat16),
        ("bfloat16", (7, 5), torch.float16),
        ("float16", (7, 5), torch.float16),
        ("float16", (9, 0), torch.float16),
        ("float32", (9, 0), torch.float32),
        (None, (9, 0), torch.bfloat16),
    ],
)
def test_dtype_on_cuda(
    monkeypatch: pytest.MonkeyPatch, checkpoint: str | None, capability: tuple[int, int], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_dtype(config(), checkpoint, CUDA) == expected


def test_float16_on_cpu_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_dtype(config(dtype="float16"), "float16", CPU) == torch.float16
    assert "float16 is slow" in caplog.text


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(config()) == CPU
    assert choose_device(config(device="cpu")) == CPU
    with pytest.raises(ConfigError, match=r"--device cuda: .*; use --device cpu, or leave the flag out"):
        choose_device(config(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_device(config()) == CUDA
    assert choose_device(config(device="cpu")) == CPU


def test_kernels() -> None:
    assert choose_kernels(config(), CPU).name == "cpu"
    assert choose_kernels(config(kernels="reference"), CPU).name == "reference"
    with pytest.raises(ConfigError, match="--kernels triton runs on cuda only, not on cpu"):
        choose_kernels(config(kernels="triton"), CPU)
    with pytest.raises(ConfigError, match="--kernels cpu runs on cpu only, not on cuda"):
        choose_kernels(config(kernels="cpu"), CUDA)


@pytest.mark.parametrize(
    ("asked", "weight_bytes", "threads"),
    [(None, 2**26 - 1, 1), (None, 2**26, torch.get_num_threads()), (5, 1, 5), (1, 2**40, 1), (64, 2**40, 64)],
)
def test_threads(asked: int | None, weight_bytes: int, threads: int) -> None:
    config = ModelConfig(model="m", num_threads=asked)
    assert choose_num_threads(config, torch.device("cpu"), weight_bytes) == threads


def test_threads_on_a_gpu() -> None:
    assert choose_num_threads(ModelConfig(model="m"), torch.device("cuda"), 2**40) is None
    with pytest.raises(ConfigError, match="--num-threads is for the CPU, not for cuda"):
        choose_num_threads(ModelConfig(model="m", num_threads=2), torch.device("cuda"), 2**40)


def test_no_threads_at_all() -> None:
    with pytest.raises(ConfigError, match="--num-threads must be at least 1, got 0"):
        ModelConfig(model="m", num_threads=0)
