"""Logits of every family on the Triton kernels, in their interpreter where there is no GPU: half a minute each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import aserve_kernels
from aserve.runtime.loader import load_model
from tests.checkpoints import FAMILIES

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's kernels are imported

PROMPTS = {"a": list(range(3, 14)), "b": [7, 130, 2, 90, 41]}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decodes_equal_transformers(checkpoint: Callable[..., Path], paged_run: Any, family: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("Triton compiles in this process, so it cannot interpret")
    folder = checkpoint(family)
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "kernels": aserve_kernels.load("triton")}
    run = paged_run(load_model(folder, **options))
    steps = ({"a": (0, 6)}, {"a": (6, 9), "b": (0, 3)}, {"b": (3, 4), "a": (9, 10)}, {"a": (10, 11), "b": (4, 5)})
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in PROMPTS}
    for step in steps:
        for name, logits in run.step([(n, PROMPTS[n][slice(*part)]) for n, part in step.items()]).items():
            parts[name].append(logits)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, prompt in PROMPTS.items():
        with torch.no_grad():
            want = model(torch.tensor([prompt])).logits[0]
        assert float((torch.cat(parts[name]) - want).abs().max() / want.abs().max()) < 1e-4
