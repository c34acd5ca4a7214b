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
from aserve.core.model_spec import ModelSpec
from aserve.models.model import Model
from aserve.planning.weights import num_active_parameters, num_parameters
from aserve.runtime.loader import load_model
from tests.checkpoints import FAMILIES

LENGTHS = {"a": 37, "b": 5, "c": 18}
Checkpoint = Callable[..., Path]


def tokens_of(name: str) -> list[int]:
    generator = torch.Generator().manual_seed(ord(name))
    return torch.randint(0, 131, (LENGTHS[name],), generator=generator).tolist()


@cache
def hf_logits(folder: Path, dtype: torch.dtype, weights: torch.dtype | None = None) -> dict[str, Tensor]:
    """What transformers computes in ``dtype``, with the weights first rounded to ``weights``."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=weights or dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.to(dtype).eval()
    with torch.no_grad():
        return {name: model(torch.tensor([tokens_of(name)])).logits[0].double() for name in LENGTHS}


def load(
    folder: Path, dtype: torch.dtype = torch.float32, kernels: str = "reference", max_model_len: int | None = None
) -> Model:
    device, chosen = torch.device("cpu"), aserve_kernels.load(kernels)
    return load_model(folder, dtype=dtype, device=device, kernels=chosen, max_model_len=max_model_len)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_counts_the_parameters_that_are_there(checkpoint: Checkpoint, family: str) -> None:
    folder = checkpoint(family)
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    spec = ModelSpec.from_folder(folder)
    assert num_parameters(spec) == stored
    if spec.experts is not None:
        by_expert = 3 * spec.hidden_size * spec.experts.intermediate_size
        idle = (spec.experts.num_experts - spec.experts.num_active) * sum(spec.experts.by_layer)
        assert num_active_parameters(spec) == stored - idle * by_expert


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


def with_rope(plain: Path, folder: Path, settings: dict[str, Any]) -> Path:
    """The same weights under a config with other settings."""
    config = json.loads((plain / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | settings))
    (folder / "model.safetensors").symlink_to(plain / "model.safetensors")
    return folder


@pytest.mark.parametrize("rope", list(ROPES))
def test_rope_types_equal_transformers(checkpoint: Checkpoint, paged_run: Any, tmp_path: Path, rope: str) -> None:
    plain = checkpoint("llama")
    folder = with_rope(plain, tmp_path, ROPES[rope])
    got = prefill(paged_run(load(folder)))
    want = hf_logits(folder, torch.float32)
    assert relative_error(got, want) < 1e-5
    assert relative_error(want, hf_logits(plain, torch.float32)) > 1e-2 or rope.startswith("dynamic")


LONG = 90
STRETCHED: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "max_position_embeddings": 128},
    "llama3": {
        "rope_scaling": {**ROPES["llama3"]["rope_scaling"], "factor": 4.0}, "max_position_embeddings": 128,
    },
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "max_position_embeddings": 32,
    },
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0],
            "original_max_position_embeddings": 32,
        },
        "max_position_embeddings": 128, "original_max_position_embeddings": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", STRETCHED)
def test_ropes_beyond_the_trained_context(checkpoint: Checkpoint, paged_run: Any, tmp_path: Path, rope: str) -> None:
    folder = with_rope(checkpoint("llama"), tmp_path, STRETCHED[rope])
    ids = torch.randint(0, 131, (LONG,), generator=torch.Generator().manual_seed(1)).tolist()
    run = paged_run(load(folder))
    parts = [run.step([("long", ids[start:stop])])["long"] for start, stop in ((0, 50), (50, LONG - 2))]
    parts += [run.step([("long", ids[place : place + 1])])["long"] for place in (LONG - 2, LONG - 1)]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].double()
    assert relative_error({"long": torch.cat(parts)}, {"long": want}) < 1e-5


def test_longrope_of_a_server_with_short_requests_has_the_short_frequencies(
    checkpoint: Checkpoint, paged_run: Any, tmp_path: Path
) -> None:
    """The longest request decides, for cached keys have the frequencies that they were written with."""
    settings = STRETCHED["longrope"] | {"original_max_position_embeddings": 60}
    folder = with_rope(checkpoint("llama"), tmp_path, settings)
    want = hf_logits(folder, torch.float32)  # all of its texts are shorter than 60
    assert relative_error(prefill(paged_run(load(folder, max_model_len=60))), want) < 1e-5
    assert relative_error(prefill(paged_run(load(folder, max_model_len=61))), want) > 1e-3


def test_internlm2_is_llama_stored_otherwise(checkpoint: Checkpoint, paged_run: Any, tmp_path: Path) -> None:
    """transformers has no code of its own for it: the same weights under both forms of storage."""
    plain = checkpoint("llama_untied_biased", mlp_bias=False)
    config = json.loads((plain / "config.json").read_text())
    stored = load_file(plain / "model.safetensors")
    names = {
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    }  # fmt: skip
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        new = name
        for ours, theirs in names.items():
            new = new.replace(ours, theirs)
        if ".q_proj." in name:
            q, k, v = (stored[name.replace("q_proj", f"{part}_proj")].unflatten(0, (-1, 16)) for part in "qkv")
            heads = [h for n in range(2) for h in (*q[3 * n : 3 * n + 3], k[n], v[n])]
            weights[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(heads)
        elif "self_attn.k" not in name and "self_attn.v" not in name:
            weights[new] = tensor.clone()
    save_file(weights, tmp_path / "model.safetensors")
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert relative_error(prefill(paged_run(load(tmp_path))), hf_logits(plain, torch.float32)) < 1e-5


def test_internlm3_is_llama_by_another_name(checkpoint: Checkpoint, paged_run: Any, tmp_path: Path) -> None:
    plain = checkpoint("llama_untied_biased")
    config = json.loads((plain / "config.json").read_text())
    config |= {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "bias": True, "qkv_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(plain / "model.safetensors")
    assert relative_error(prefill(paged_run(load(tmp_path))), hf_logits(plain, torch.float32)) < 1e-5


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("glm", {"partial_rotary_factor": 1.0}),
        ("cohere2", {"sliding_window": 200}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"attention_multiplier": 0.25}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"num_experts_per_tok": 3}),
    ],
)
def test_what_is_new_in_these_families_matters(checkpoint: Checkpoint, family: str, change: dict[str, Any]) -> None:
    plain = hf_logits(checkpoint(family), torch.float32)
    assert relative_error(hf_logits(checkpoint(family, **change), torch.float32), plain) > 1e-2


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
