"""Logits of every family against transformers: prefill, chunks, decode and mixed steps through the paged cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import aserve_kernels
from aserve.core.errors import ModelLoadError
from aserve.models.model import Model
from aserve.runtime.loader import load_model

FAMILIES = ("llama", "llama_untied_biased", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
LENGTHS = {"a": 37, "b": 5, "c": 18}
Checkpoint = Callable[..., Path]


def tokens_of(name: str) -> list[int]:
    generator = torch.Generator().manual_seed(ord(name))
    return torch.randint(0, 131, (LENGTHS[name],), generator=generator).tolist()


@cache
def hf_logits(folder: Path, dtype: torch.dtype, weights: torch.dtype | None = None) -> dict[str, Tensor]:
    """What transformers computes in ``dtype``, with the weights first rounded to ``weights``."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=weights or dtype, attn_implementation="eager"
    )
    model = model.to(dtype).eval()
    with torch.no_grad():
        return {name: model(torch.tensor([tokens_of(name)])).logits[0].double() for name in LENGTHS}


def load(folder: Path, dtype: torch.dtype = torch.float32, kernels: str = "reference") -> Model:
    return load_model(folder, dtype=dtype, device=torch.device("cpu"), kernels=aserve_kernels.load(kernels))


def prefill(run: Any) -> dict[str, Tensor]:
    return run.step([(name, tokens_of(name)) for name in LENGTHS])


def chunks_and_decodes(run: Any) -> dict[str, Tensor]:
    """Prompts in uneven chunks beside decodes of the others, then decodes of all that is left."""
    left = {name: tokens_of(name) for name in LENGTHS}
    parts: dict[str, list[Tensor]] = {name: [] for name in LENGTHS}
    for sizes in ({"a": 9}, {"a": 14, "b": 2}, {"c": 11, "a": 1, "b": 1}, {"b": 1, "c": 3, "a": 1}):
        chunks = []
        for name, size in sizes.items():
            chunks.append((name, left[name][:size]))
            left[name] = left[name][size:]
        for name, logits in run.step(chunks).items():
            parts[name].append(logits)
    while any(left.values()):
        names = [name for name in ("c", "a", "b") if left[name]]
        for name, logits in run.step([(name, [left[name].pop(0)]) for name in names]).items():
            parts[name].append(logits)
    return {name: torch.cat(part) for name, part in parts.items()}


WAYS = {"prefill": prefill, "chunks_and_decodes": chunks_and_decodes}


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest difference over largest logit."""
    largest = max(float(w.abs().max()) for w in want.values())
    return max(float((got[name].double() - want[name]).abs().max()) for name in want) / largest


def rms_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return float(torch.cat([(got[name].double() - want[name]).flatten() for name in want]).square().mean().sqrt())


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_equal_transformers(
    checkpoint: Checkpoint, paged_run: Any, family: str, kernels: str, way: str
) -> None:
    folder = checkpoint(family)
    got = WAYS[way](paged_run(load(folder, kernels=kernels)))
    assert relative_error(got, hf_logits(folder, torch.float32)) < 1e-5


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_as_near_to_the_truth_as_transformers(
    checkpoint: Checkpoint, paged_run: Any, family: str, kernels: str
) -> None:
    folder = checkpoint(family)
    truth = hf_logits(folder, torch.float64, torch.bfloat16)
    theirs = rms_error(hf_logits(folder, torch.bfloat16), truth)
    model = load(folder, torch.bfloat16, kernels)
    for way in WAYS.values():
        assert rms_error(way(paged_run(model)), truth) < 1.15 * theirs


ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_theta": 500.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "dynamic_below_its_context": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {
        "rope_theta": 5000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "yarn_with_all_settings": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 32,
            "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False,
        },
    },
    "parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
}  # fmt: skip


@pytest.mark.parametrize("rope", list(ROPES))
def test_rope_types_equal_transformers(checkpoint: Checkpoint, paged_run: Any, tmp_path: Path, rope: str) -> None:
    plain = checkpoint("llama")
    config = json.loads((plain / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | ROPES[rope]))
    (tmp_path / "model.safetensors").symlink_to(plain / "model.safetensors")
    got = prefill(paged_run(load(tmp_path)))
    want = hf_logits(tmp_path, torch.float32)
    assert relative_error(got, want) < 1e-5
    assert relative_error(want, hf_logits(plain, torch.float32)) > 1e-2 or rope.startswith("dynamic")


def test_windows_matter_in_these_tests(checkpoint: Checkpoint) -> None:
    windowed = hf_logits(checkpoint("mistral"), torch.float32)
    whole = hf_logits(checkpoint("mistral", sliding_window=None), torch.float32)
    assert relative_error(windowed, whole) > 1e-2


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_what_is_new_in_gemma_matters_in_these_tests(checkpoint: Checkpoint, family: str) -> None:
    plain = hf_logits(checkpoint(family), torch.float32)
    changes: list[dict[str, Any]] = [{"sliding_window": 200}, {"query_pre_attn_scalar": 16}]
    if family == "gemma2":
        changes += [{"attn_logit_softcapping": None}, {"final_logit_softcapping": None}]
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4}
        changes += [{"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}]
    for change in changes:
        assert relative_error(hf_logits(checkpoint(family, **change), torch.float32), plain) > 1e-2, change


def test_gemma3_with_images_is_served_without_them(checkpoint: Checkpoint, paged_run: Any, tmp_path: Path) -> None:
    """Under the names that published checkpoints have, and under those of transformers 5's modules."""
    plain = checkpoint("gemma3")
    inner = json.loads((plain / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner}
    weights = load_file(plain / "model.safetensors")
    others = {
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight",
    }
    for number, (prefix, outer) in enumerate((("language_model.model.", ""), ("model.language_model.", "model."))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        named = {prefix + name.removeprefix("model."): tensor for name, tensor in weights.items()}
        save_file({**named, **{outer + name: torch.ones(2) for name in others}}, folder / "model.safetensors")
        got = prefill(paged_run(load(folder)))
        assert relative_error(got, hf_logits(plain, torch.float32)) < 1e-5


def test_two_names_of_one_weight_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    weights = load_file(checkpoint("gemma3") / "model.safetensors")
    inner = json.loads((checkpoint("gemma3") / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    double = {"model.language_model.norm.weight": weights["model.norm.weight"].clone()}
    save_file({**weights, **double}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="stand for the same weight"):
        load(tmp_path)
